// Training of a part of a model: what is frozen stays as it is and costs nothing but its value, on every
// axis.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "checkpoint/checkpoint.h"
#include "expert_runs.h"
#include "predicted_runs.h"
#include "refusals.h"
#include "spec/block_passes.h"
#include "train/asynchronous.h"
#include "verify/verify.h"

namespace echelon::fine_tuning_test {
namespace {

using namespace checks;

ModelSpec frozen(ModelSpec model, const std::string& patterns) {
  model.tuning.freeze = parse_freeze(patterns);
  return model;
}

// A part of each: one of several stacked matrices, some of a layer's parameters, a whole layer, the table.
const std::string some_of_llama =
    "*.q_proj.weight,*.norm.weight,model.layers.0.mlp.*,model.embed_tokens.weight";
const std::string some_of_gpt2 = "*.ln_?.weight,*.attn.c_attn.bias,transformer.h.1.*,transformer.wpe.*";

// f64 on the reference kernels, and bf16 with its master weights.
std::vector<PrecisionRecipe> precisions() {
  std::vector<PrecisionRecipe> all{parse_recipe("f64", "it")};
  if (has_cpu_kernels()) all.push_back(parse_recipe("bf16", "it"));
  return all;
}

struct Case {
  std::string name;
  Plan plan;
};

// Every axis, alone and beside others.
std::vector<Case> cases(const PrecisionRecipe& precision) {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, const ModelSpec& model, int dp, int tp, const auto& change) {
    Plan plan = odd_plan(model, dp, tp, tp > 1);
    plan.precision = precision;
    change(plan);
    all.push_back({name, plan});
  };
  const auto nothing = [](Plan&) {};
  const ModelSpec llama = frozen(odd_llama(), some_of_llama), gpt2 = frozen(odd_gpt2(), some_of_gpt2);
  add("dp", llama, 3, 1, nothing);
  add("dp gpt2", gpt2, 2, 1, nothing);
  add("tp", llama, 1, 2, nothing);
  add("tp without sp", llama, 1, 4, [](Plan& p) { p.sequence_parallel = false; });
  add("tp gpt2", gpt2, 1, 2, nothing);
  add("tied table", frozen(odd_gpt2(), "transformer.wte.weight"), 2, 2, nothing);
  for (int zero : {1, 2, 3}) {
    add(fmt::format("zero {}", zero), llama, 3, 1, [&](Plan& p) { p.zero = zero; });
    add(fmt::format("zero {} x tp", zero), gpt2, 2, 2, [&](Plan& p) { p.zero = zero; });
  }
  add("hsdp", llama, 4, 1, [](Plan& p) { p.zero = 3, p.hsdp = 2; });
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v", "dualpipe", "interleaved"})
    add(schedule, frozen(odd_llama(false, 2, 4), some_of_llama), 1, 1, [&](Plan& p) {
      p.mesh.set(Axis::pp, 2);
      p.schedule = schedule;
      p.global_batch = 8;
    });
  add("tied over pp", frozen(odd_gpt2(true, 2), "*.wte.*,*.c_fc.*"), 1, 2,
      [](Plan& p) { p.mesh.set(Axis::pp, 2); });
  add("a stage without training", frozen(odd_llama(), "model.layers.0.*,*embed*"), 1, 1,
      [](Plan& p) { p.mesh.set(Axis::pp, 2), p.schedule = "gpipe"; });
  add("no barrier", frozen(odd_llama(), some_of_llama), 1, 1,
      [](Plan& p) { p.mesh.set(Axis::pp, 2), p.optimizer_barrier = false; });
  add("cp", llama, 1, 1, [](Plan& p) { p.mesh.set(Axis::cp, 2), p.seq_len = 12; });
  for (const char* patterns :
       {"*.experts.*", "*.gate.weight,*.experts.?.w2.weight", "*.experts.[0-3].*", "*.self_attn.*"})
    add(fmt::format("ep {}", patterns), frozen(even_mixtral(3), patterns), 2, 1,
        [](Plan& p) { p.mesh.ep = 2; });
  add("ep zero 3", frozen(even_deepseek(3), "*.experts.[0-3].*,*.shared_experts.*,*norm*"), 4, 1,
      [](Plan& p) { p.mesh.ep = 2, p.zero = 3, p.global_batch = 8; });
  add("recompute", llama, 1, 2, [](Plan& p) { p.recompute = Recompute::full; });
  add("recompute some", gpt2, 1, 1, [](Plan& p) { p.recompute = Recompute({"linear"}); });
  add("compressed", llama, 2, 1, [](Plan& p) { p.compression = parse_compression("topk:1", "it"); });
  return all;
}

TEST(Frozen, TheMeshTrainsAsOneRankDoes) {
  for (const auto& [name, plan] : cases(DType::f64)) {
    if (!is_taken()) continue;
    SCOPED_TRACE(name + " " + describe(plan));
    VerifyRequest request;
    request.plan = plan;
    request.optimizer.warmup_steps = 0;
    request.optimizer.total_steps = 10;
    request.optimizer.clip = 0.1;
    request.run.timeout = patience;
    request.steps = 2;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    EXPECT_LE(report.grad_max_rel_diff, 1e-10);
    EXPECT_LE(report.param_max_rel_diff, 1e-10);
  }
}

TEST(Frozen, MemoryAndTrafficArePredicted) {
  for (const auto& [name, plan] : cases(DType::f64)) {
    if (!plan.optimizer_barrier) continue;
    SCOPED_TRACE(name);
    expect_predicted(plan);
  }
  if (!has_cpu_kernels()) return;
  for (const auto& [name, plan] : cases(parse_recipe("bf16", "it"))) {
    if (!plan.optimizer_barrier || !is_taken(3) || !memory_assumptions(plan).empty()) continue;
    SCOPED_TRACE(name);
    const std::vector<Measured> measured = measure(plan);
    const PipelineLayout pipeline(plan);
    for (int rank = 0; rank < plan.mesh.num_ranks(); ++rank) {
      const Coordinates at = plan.mesh.coordinates(rank);
      Memory predicted = predict_memory(plan, pipeline, at);
      predicted[MemoryCategory::other] += kernel_scratch_bytes(plan.precision, 1);
      expect_same(predicted, measured[static_cast<std::size_t>(rank)].peak);
    }
  }
}

// Two steps on one rank: what moved, and what the first gradients were.
struct Trained {
  LogicalTensors before, after, gradients;
  double norm = 0;
};
Trained train(const ModelSpec& model) {
  Trained t;
  const Plan plan = odd_plan(model, 1, 1, false);
  on_mesh(plan, [&](const Rank& rank) {
    OptimizerOptions options;
    options.warmup_steps = 0;
    Trainer trainer(rank, plan, options, 1);
    t.before = gather(rank, trainer, ParameterTensor::value);
    for (std::int64_t step : {0, 1}) {
      trainer.compute_gradients(step, random_samples(plan));
      if (step == 0)
        for (const Parameter& p : trainer.parameters().all())
          if (!p.spec.frozen)
            t.gradients[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::gradient));
      const double norm = trainer.apply_gradients(step).gradient_norm;
      if (step == 0) t.norm = norm;
    }
    t.after = gather(rank, trainer, ParameterTensor::value);
  });
  return t;
}

TEST(Frozen, StaysAsItIsWhileTheRestHasTheSameGradients) {
  for (const auto& [model, patterns] : {std::pair{odd_llama(), some_of_llama},
                                        {odd_gpt2(), some_of_gpt2},
                                        {odd_gpt2(), std::string("*.weight")},
                                        {odd_gpt2(), std::string("*.bias")},
                                        {odd_mixtral(), std::string("*.experts.[024].*,*.gate.weight")},
                                        {odd_deepseek(), std::string("*.shared_experts.*,*.k_proj.*")}}) {
    SCOPED_TRACE(model.name + " " + patterns);
    const ModelSpec part = frozen(model, patterns);
    const Trained whole = train(model), some = train(part);
    std::set<std::string> still;
    double squares = 0;
    for (const ParamSpec& spec : all_parameters(part)) {
      SCOPED_TRACE(spec.name);
      EXPECT_EQ(some.before.at(spec.name), whole.before.at(spec.name));
      EXPECT_EQ(some.gradients.contains(spec.name), !spec.frozen);
      EXPECT_EQ(some.after.at(spec.name) == some.before.at(spec.name), spec.frozen);
      if (spec.frozen) continue;
      EXPECT_LE(relative_difference(whole.gradients.at(spec.name), some.gradients.at(spec.name)), 1e-12);
      for (double g : some.gradients.at(spec.name)) squares += g * g;
    }
    EXPECT_NEAR(some.norm, std::sqrt(squares), 1e-12 * some.norm);
    EXPECT_LT(some.norm, whole.norm);
  }
}

// To the byte: values of all, the rest of what is trained alone.
TEST(Frozen, HasAValueAndNothingElse) {
  const ModelSpec part = frozen(odd_llama(), some_of_llama);
  std::int64_t all = 0, trained = 0;
  for (const ParamSpec& spec : all_parameters(part)) {
    all += spec.numel();
    trained += spec.frozen ? 0 : spec.numel();
  }
  EXPECT_EQ(num_trained_parameters(part), trained);
  EXPECT_LT(trained, all);
  for (const auto& [name, value, gradient, optimizer] : {std::tuple{"f64", 8, 8, 16}, {"bf16", 2, 4, 12}}) {
    Plan plan = odd_plan(part, 1, 1, false);
    plan.precision = parse_recipe(name, "it");
    const Memory memory = predict_memory(plan, PipelineLayout(plan));
    EXPECT_EQ(memory[MemoryCategory::parameters], value * all);
    EXPECT_EQ(memory[MemoryCategory::gradients], gradient * trained);
    EXPECT_EQ(memory[MemoryCategory::optimizer], optimizer * trained);
  }
  // Data parallelism in two parts sends what is trained once over, but for the counts and the norm's sums.
  const auto sent = [](const ModelSpec& model) {
    const Plan plan = odd_plan(model, 2, 1, false);
    return predict_traffic(plan, PipelineLayout(plan)).at(Axis::dp, Verb::all_reduce).bytes;
  };
  EXPECT_EQ(sent(odd_llama()) - sent(part), 8 * (all - trained));
  EXPECT_LT(model_flops_per_token(part, 11), model_flops_per_token(odd_llama(), 11));
}

// An input that is read for the gradient of a frozen matrix alone is not made again.
TEST(Frozen, MakesLessAgainForItsBackwardPass) {
  const auto made_again = [](const ModelSpec& model) {
    std::size_t ops = 0;
    for (const OpSequence& sequence : block_passes(layer_program(model, 0), Recompute::none).again)
      ops += sequence.ops.size();
    return ops;
  };
  EXPECT_EQ(made_again(odd_llama()), 2u);  // the norms' outputs
  EXPECT_EQ(made_again(frozen(odd_llama(), "*.q_proj.weight,*.mlp.*")), 1u);
  EXPECT_EQ(made_again(frozen(odd_llama(), "*_proj.weight")), 0u);
}

struct State {
  LogicalTensors values, exp_avg;
  bool operator==(const State&) const = default;
};
State state_of(const Rank& rank, const Trainer& trainer) {
  State state{gather(rank, trainer, ParameterTensor::value), {}};
  for (const Parameter& p : trainer.parameters().all())
    if (!p.spec.frozen)
      state.exp_avg[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::exp_avg));
  return state;
}

TEST(Frozen, IsInCheckpointsThatLoadOnAnyMesh) {
  const ModelSpec model = frozen(odd_llama(), some_of_llama);
  for (const PrecisionRecipe& precision : precisions())
    for (int zero : {0, 1, 3}) {
      const TemporaryDirectory directory;
      Plan plan = odd_plan(model, 2, 2, true);
      plan.precision = precision;
      plan.zero = zero;
      State saved;
      std::string path;
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        for (std::int64_t step : {0, 1}) {
          trainer.compute_gradients(step, random_samples(plan));
          trainer.apply_gradients(step);
        }
        CheckpointInfo info;
        info.step = 2;
        info.seed = 1;
        info.dtype = plan.precision.master;
        info.model = plan.model;
        const State mine = state_of(rank, trainer);
        const std::string where = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
        if (rank.index() == 0) saved = mine, path = where;
      });
      const CheckpointInfo info = read_checkpoint_info(path);
      EXPECT_EQ(info.model.tuning, model.tuning);
      for (const auto& [dp, tp, stage] : {std::tuple{1, 1, 0}, {3, 1, 3}, {1, 4, 0}, {2, 1, 2}}) {
        Plan other = odd_plan(model, dp, tp, tp > 1);
        other.precision = precision;
        other.zero = stage;
        SCOPED_TRACE(describe(other));
        on_mesh(other, [&](const Rank& rank) {
          Trainer trainer(rank, other, {}, 99);
          load_checkpoint(rank, trainer.parameters(), info, false);
          EXPECT_EQ(state_of(rank, trainer), saved);
        });
      }
    }
}

TEST(Frozen, PatternsThatMatchNothingAreRefusedWithNearNames) {
  const auto refused = [](const std::string& patterns, const std::vector<std::string>& words) {
    expect_refusal([&] { validate(odd_plan(frozen(odd_llama(), patterns), 1, 1, false)); }, words);
  };
  refused("*.q_prj.weight", {"--freeze *.q_prj.weight", "no parameter of odd-llama",
                             "legal: model.layers.0.self_attn.q_proj.weight"});
  refused("lm_head.weigth", {"legal: lm_head.weight"});
  refused("*norm*,lm_head", {"a name like lm_head", "lm_head.weight"});
  refused("*norm*,", {"an empty one"});
  refused("*", {"--freeze *", "nothing of odd-llama would be trained", "legal: none"});
  expect_refusal([&] { validate(odd_plan(frozen(odd_mixtral(), "*.experts.1.w1.weight"), 1, 1, false)); },
                 {"experts.1.w1.weight and ", "experts.1.w3.weight are one matrix"});
  expect_refusal([&] { refuse_asynchronous(odd_plan(frozen(odd_llama(), "*norm*"), 2, 1, false), {}); },
                 {"--staleness", "--freeze none"});
}

}  // namespace
}  // namespace echelon::fine_tuning_test
