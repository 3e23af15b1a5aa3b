// Muon's step is that of whole matrices, however they are cut.
#include "train/muon.h"

#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "expert_runs.h"
#include "predicted_runs.h"
#include "refusals.h"
#include "train/asynchronous.h"
#include "verify/verify.h"

namespace echelon::muon_test {
namespace {

using namespace checks;

Plan muon_plan(const ModelSpec& model, int dp, int tp, DType dtype = DType::f64) {
  Plan plan = odd_plan(model, dp, tp, tp > 1, dtype);
  plan.optimizer = OptimizerKind::muon;
  return plan;
}

VerifyReport verified(const Plan& plan) {
  VerifyRequest request;
  request.plan = plan;
  request.optimizer = clipping();
  request.run.timeout = patience;
  request.steps = 2;
  return verify(request);
}

// What five iterations make of a singular value.
double orthogonalized(double s) {
  for (int i = 0; i < 5; ++i) s = 3.4445 * s - 4.7750 * std::pow(s, 3) + 2.0315 * std::pow(s, 5);
  return s;
}

using Columns = std::vector<std::vector<double>>;  // `count` orthonormal ones of length `rows`
Columns orthonormal(std::int64_t rows, std::int64_t count, std::uint64_t seed) {
  Columns columns;
  for (std::int64_t k = 0; k < count; ++k) {
    std::vector<double> x(static_cast<std::size_t>(rows));
    Philox(seed, Stream::test, static_cast<std::uint64_t>(k)).fill_normal(0, x.size(), x.data());
    for (int again = 0; again < 2; ++again)
      for (const auto& other : columns) {
        const double dot = std::inner_product(x.begin(), x.end(), other.begin(), 0.0);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] -= dot * other[i];
      }
    const double norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
    for (double& one : x) one /= norm;
    columns.push_back(x);
  }
  return columns;
}

std::vector<double> product_of(const Columns& u, const std::vector<double>& s, const Columns& v) {
  const std::size_t rows = u.front().size(), cols = v.front().size();
  std::vector<double> x(rows * cols);
  for (std::size_t k = 0; k < s.size(); ++k)
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < cols; ++j) x[i * cols + j] += s[k] * u[k][i] * v[k][j];
  return x;
}

// U S V^T becomes U f(S) V^T: singular values change as numbers do, singular vectors not at all.
TEST(Muon, OrthogonalizesBySingularValues) {
  Arena arena;
  const auto reference = make_reference_kernels();
  for (const auto& [rows, cols] : {std::pair{5, 9}, {9, 5}, {6, 6}, {1, 7}, {7, 1}, {1, 1}}) {
    const std::int64_t count = std::min(rows, cols);
    const Columns u = orthonormal(rows, count, 3), v = orthonormal(cols, count, 5);
    std::vector<double> s, f;
    double squares = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      s.push_back(7 * std::pow(0.3, static_cast<double>(k)));
      squares += s.back() * s.back();
    }
    for (const double one : s) f.push_back(orthogonalized(one / std::sqrt(squares)));
    Tensor x(arena, MemoryCategory::other, DType::f64, {rows, cols});
    copy_from_host(product_of(u, s, v), x);
    orthogonalize(*reference, x);
    EXPECT_LT(relative_difference(product_of(u, f, v), as_doubles(x)), 1e-13) << rows << " x " << cols;
    for (const double one : f) EXPECT_LT(std::abs(one), 1.21);
  }
}

// What is smaller than 1e-7 is divided by that, in f32 too, where the inverse of its norm may be infinite.
TEST(Muon, LeavesVanishedGradientsSmall) {
  Arena arena;
  const auto reference = make_reference_kernels();
  for (const DType dtype : {DType::f64, DType::f32})
    for (const double norm : {1e-9, 1e-42}) {
      const Columns u = orthonormal(4, 1, 3), v = orthonormal(6, 1, 5);
      Tensor x(arena, MemoryCategory::other, dtype, {4, 6});
      copy_numbers_from_host(product_of(u, {norm}, v), x);
      orthogonalize(*reference, x);
      const double expected = orthogonalized(norm / 1e-7);
      double squares = 0;
      for (const double one : as_doubles(x)) squares += one * one;
      EXPECT_NEAR(std::sqrt(squares), expected, (dtype == DType::f64 ? 1e-12 : 1e-3) * expected + 1e-30);
    }
}

// An expert without tokens has no gradient.
TEST(Muon, LeavesZerosAlone) {
  Arena arena;
  const auto reference = make_reference_kernels();
  Tensor x(arena, MemoryCategory::other, DType::f32, {4, 6});
  reference->fill(x, 0.0);
  orthogonalize(*reference, x);
  EXPECT_EQ(as_doubles(x), std::vector<double>(24, 0.0));
}

// No difference of two matrices grows by more than the slope at 0: f(s) is steepest there.
TEST(Muon, ItsSlopeIsSteepestAtZero) {
  for (double s = 0; s < 1; s += 1e-4)
    EXPECT_LE(std::abs(orthogonalized(s + 1e-7) - orthogonalized(s)), 1e-7 * orthogonalization_slope());
  EXPECT_NEAR(orthogonalized(1e-9) / 1e-9, orthogonalization_slope(), 1e-6);
}

// Two steps written out: the first from a momentum of zero.
TEST(Muon, StepsByMomentumAlongOrthogonalMatrices) {
  const Plan plan = muon_plan(odd_llama(), 1, 1);
  OptimizerOptions options = clipping();
  const auto reference = make_reference_kernels();
  Arena arena;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, options, 1);
    LogicalTensors momentum;
    int whole = 0;
    for (std::int64_t step : {0, 1}) {
      trainer.compute_gradients(step, random_samples(plan));
      const LogicalTensors before = gather(rank, trainer, ParameterTensor::value),
                           gradients = gather(rank, trainer, ParameterTensor::gradient);
      const StepResult result = trainer.apply_gradients(step);
      const double clip = clip_factor(result.gradient_norm, options.clip), lr = result.learning_rate;
      EXPECT_LT(clip, 1);
      for (const Parameter& p : trainer.parameters().all()) {
        const std::string& name = p.spec.name;
        const bool is_table = name == "lm_head.weight" || name == "model.embed_tokens.weight";
        ASSERT_EQ(p.is_updated_whole, p.spec.shape.size() == 2 && !is_table) << name;
        if (!p.is_updated_whole) continue;
        ++whole;
        std::vector<double>& m = momentum[name];
        m.resize(gradients.at(name).size());
        std::vector<double> ahead, expected;
        for (std::size_t k = 0; k < m.size(); ++k) {
          m[k] = 0.95 * m[k] + clip * gradients.at(name)[k];
          ahead.push_back(0.95 * m[k] + clip * gradients.at(name)[k]);
        }
        Tensor x(arena, MemoryCategory::other, DType::f64, p.spec.shape);
        copy_from_host(ahead, x);
        orthogonalize(*reference, x);
        const std::vector<double> o = as_doubles(x);
        const double size = 0.2 * std::sqrt(static_cast<double>(std::max(p.spec.shape[0], p.spec.shape[1])));
        for (std::size_t k = 0; k < m.size(); ++k)
          expected.push_back((1 - lr * options.weight_decay) * before.at(name)[k] - lr * size * o[k]);
        EXPECT_LT(relative_difference(expected, as_doubles(p.value)), 1e-14) << name;
        EXPECT_LT(relative_difference(m, as_doubles(p.exp_avg)), 1e-14) << name;
        EXPECT_FALSE(p.exp_avg_sq.defined());
      }
    }
    EXPECT_EQ(whole, 2 * 7 * plan.model.num_layers);
  });
}

// What Muon leaves to AdamW moves as it does without Muon.
TEST(Muon, LeavesTheRestToAdamW) {
  Plan plan = muon_plan(odd_gpt2(true), 1, 1);
  const SampleSource samples = random_samples(plan);
  const Outcome muon = run_steps(plan, clipping(), 1, samples).front();
  plan.optimizer = OptimizerKind::adamw;
  const Outcome adamw = run_steps(plan, clipping(), 1, samples).front();
  std::set<std::string> same;
  for (const auto& [name, value] : muon.values)
    if (value == adamw.values.at(name)) same.insert(name);
  for (const auto& [name, squares] : muon.exp_avg_sq) EXPECT_TRUE(same.contains(name)) << name;
  EXPECT_EQ(same.size(), muon.exp_avg_sq.size());
}

// ZeRO is where state lives, for Muon too: the bits of plain data parallelism.
TEST(Muon, GivesTheSameBitsUnderZero) {
  for (const ModelSpec& model : {odd_gpt2(true), odd_llama(false), odd_mixtral()})
    for (const auto& [dp, tp] : {std::pair{2, 1}, {3, 1}, {4, 1}, {2, 2}}) {
      if (!is_taken()) continue;
      Plan plan = muon_plan(model, dp, tp);
      const auto outcomes = [&] { return run_steps(plan, clipping(), 2, random_samples(plan)); };
      const std::vector<Outcome> plain = outcomes();
      for (const int zero : {1, 2, 3})
        for (const int hsdp : {1, 2}) {
          if (dp % hsdp != 0) continue;
          plan.zero = zero, plan.hsdp = hsdp;
          EXPECT_EQ(outcomes(), plain) << "zero " << zero << " hsdp " << hsdp << " " << describe(plan);
        }
    }
}

// Each axis, and what has matrices of other shapes or in other places.
TEST(Muon, IsThatOfOneRankOnAnyMesh) {
  ModelSpec hybrid = odd_llama();
  hybrid.state_space = {4, 3, 1, 5, 3, true, 4, {1}};
  const auto check = [](Plan plan) {
    if (!is_taken()) return;
    const VerifyReport report = verified(plan);
    EXPECT_TRUE(report.pass) << describe(plan);
    EXPECT_LT(report.param_max_rel_diff, 1e-9) << describe(plan);
  };
  for (const ModelSpec& model : {odd_gpt2(true), odd_llama(false), odd_mixtral(), odd_deepseek(), hybrid})
    for (const int tp : {2, 4}) check(muon_plan(model, 2, tp));
  Plan plan = muon_plan(odd_llama(false, 2, 4), 2, 1);
  plan.mesh.set(Axis::pp, 2);
  plan.global_batch = 8, plan.micro_batch = 1;
  for (const char* schedule : {"1f1b", "zb-v", "dualpipev"}) {
    plan.schedule = schedule;
    check(plan);
  }
  plan = muon_plan(odd_llama(), 1, 2);
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 12;
  check(plan);
  plan = muon_plan(even_mixtral(2), 2, 2);
  plan.mesh.ep = 2;
  for (const int zero : {0, 1, 3}) {
    plan.zero = zero;
    check(plan);
  }
  plan = muon_plan(odd_llama(), 2, 1);
  plan.model.tuning.lora = {2, 4, {}};
  check(plan);
}

// In f64 no more is allowed than what comes of rounding.
TEST(Muon, VerifyAllowsLittle) {
  const VerifyReport report = verified(muon_plan(odd_llama(), 2, 2));
  EXPECT_TRUE(report.pass);
  EXPECT_GT(report.param_worst, 1e-6);
  EXPECT_LT(report.param_worst, 1);
}

TEST(Muon, IsInvariantToTheLastBit) {  // long
  for (const auto& [dp, tp, zero] : {std::tuple{2, 2, 1}, {1, 2, 0}, {4, 1, 3}}) {
    Plan plan = muon_plan(odd_llama(), dp, tp, DType::f32);
    plan.numerics = Numerics::invariant;
    plan.global_batch = 8;
    plan.zero = zero;
    EXPECT_TRUE(verified(plan).bitwise) << describe(plan);
  }
}

TEST(Muon, SendsAndHoldsWhatIsPredicted) {
  for (const ModelSpec& model : {odd_gpt2(true), odd_llama(), even_mixtral(2)})
    for (const auto& [dp, tp] : {std::pair{1, 1}, {2, 2}, {4, 1}, {1, 4}})
      for (const int zero : {0, 1, 2, 3}) {
        Plan plan = muon_plan(model, dp, tp);
        plan.zero = zero;
        expect_predicted(plan);
      }
  Plan plan = muon_plan(odd_llama(false, 2, 4), 2, 1);
  plan.mesh.set(Axis::pp, 2);
  expect_predicted(plan);
}

// Half of AdamW's state, where AdamW has nothing to update.
TEST(Muon, HasNoSecondMoments) {
  Plan plan = muon_plan(odd_llama(), 1, 1);
  const auto state = [&] { return predict_memory(plan, PipelineLayout(plan))[MemoryCategory::optimizer]; };
  const std::int64_t muon = state();
  plan.optimizer = OptimizerKind::adamw;
  std::int64_t whole = 0;
  for (const ParamSpec& spec : all_parameters(plan.model))
    if (is_updated_whole(OptimizerKind::muon, spec)) whole += spec.numel();
  EXPECT_GT(whole, 0);
  EXPECT_EQ(state() - muon, 8 * whole);
}

// Saved on one mesh, loaded on another: the same tensors, and the same bits from there on.
TEST(Muon, CheckpointsKnowNoMesh) {
  const TemporaryDirectory directory;
  const auto state_of = [](const Rank& rank, const Trainer& trainer) {
    return std::array{gather(rank, trainer, ParameterTensor::value),
                      gather(rank, trainer, ParameterTensor::exp_avg), gather_second_moments(rank, trainer)};
  };
  Plan from = muon_plan(odd_llama(), 2, 2);
  from.zero = 2;
  std::array<LogicalTensors, 3> saved;
  std::string path;
  on_mesh(from, [&](const Rank& rank) {
    Trainer trainer(rank, from, clipping(), 1);
    trainer.compute_gradients(0, random_samples(from));
    trainer.apply_gradients(0);
    const auto mine = state_of(rank, trainer);
    CheckpointInfo info;
    info.step = info.updates = 1;
    info.seed = 1;
    info.dtype = from.precision.master;
    info.optimizer = from.optimizer;
    info.model = from.model;
    const std::string where = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
    if (rank.index() == 0) saved = mine, path = where;
  });
  const CheckpointInfo info = read_checkpoint_info(path);
  EXPECT_EQ(info.optimizer, OptimizerKind::muon);
  for (const auto& [dp, tp, zero] : {std::tuple{1, 1, 0}, {3, 2, 3}, {4, 1, 1}}) {
    Plan to = muon_plan(odd_llama(), dp, tp);
    to.zero = zero;
    on_mesh(to, [&](const Rank& rank) {
      Trainer trainer(rank, to, clipping(), 99);  // another seed: nothing is right by chance
      load_checkpoint(rank, trainer.parameters(), info, false);
      EXPECT_EQ(state_of(rank, trainer), saved) << describe(to);
    });
  }
}

TEST(Muon, IsRefusedWhereMatricesAreNeverWhole) {
  Plan plan = muon_plan(odd_llama(), 1, 1);
  plan.offload = Offload::optimizer;
  expect_contains(message_of<RequestError>([&] { validate(plan); }), {"--optimizer muon", "--offload none"});
  plan.offload = Offload::none;
  plan.optimizer_barrier = false;
  expect_contains(message_of<RequestError>([&] { validate(plan); }),
                  {"--optimizer muon", "--optimizer-barrier on"});
  plan.optimizer_barrier = true;
  EXPECT_NO_THROW(validate(plan));
  expect_contains(message_of<RequestError>([&] { refuse_asynchronous(plan, {}); }),
                  {"--staleness", "--optimizer adamw"});
}

}  // namespace
}  // namespace echelon::muon_test
