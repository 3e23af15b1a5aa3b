// One rank against the mesh over a grid of meshes: dp 1, 2, 3, 4 x tp 1, 2, 4 x sp off and on, with an
// uneven vocabulary, MLP, batch and microbatch, and clipping that bites.
#include "verify/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "case_choice.h"
#include "data/tokens.h"
#include "random_models.h"

namespace echelon::verify_test {
namespace {

using namespace checks;
using checks::Outcome;  // not a search's

// Below the gradient norms of these models (ClippingBites).
constexpr double small_clip = 0.1;

VerifyRequest request_for(const Plan& plan, std::int64_t steps) {
  VerifyRequest request;
  request.plan = plan;
  request.optimizer.warmup_steps = 0;
  request.optimizer.total_steps = 10;
  request.optimizer.clip = small_clip;
  request.run.timeout = patience;
  request.steps = steps;
  return request;
}

void expect_pass(const Plan& plan, std::int64_t steps, double largest) {
  if (!is_taken()) return;
  SCOPED_TRACE(describe(plan));
  const VerifyReport report = verify(request_for(plan, steps));
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  EXPECT_FALSE(report.first_difference);
  EXPECT_EQ(report.steps, steps);
  EXPECT_EQ(report.reference_losses.size(), static_cast<std::size_t>(steps));
  EXPECT_EQ(report.mesh_losses.size(), static_cast<std::size_t>(steps));
  EXPECT_LE(report.loss_max_rel_diff, largest);
  EXPECT_LE(report.grad_max_rel_diff, largest);
  EXPECT_LE(report.param_max_rel_diff, largest);
  EXPECT_LE(report.param_worst, 1);
  EXPECT_TRUE(report.bitwise || plan.mesh.num_ranks() > 1);
}

// What f64 must reach; the report itself holds the run to verify_bound, far below it.
constexpr double f64_bar = 1e-10;

TEST(Verify, Gpt2TiedPassesOnEveryMesh) {
  for_each_mesh([](int dp, int tp, bool sp) { expect_pass(odd_plan(odd_gpt2(), dp, tp, sp), 2, f64_bar); });
}

TEST(Verify, LlamaUntiedPassesOnEveryMesh) {
  for_each_mesh([](int dp, int tp, bool sp) { expect_pass(odd_plan(odd_llama(), dp, tp, sp), 2, f64_bar); });
}

TEST(Verify, TheOtherTyingAndHeadCountsPass) {
  for (bool sp : {false, true})
    for (int tp : {2, 4}) {
      expect_pass(odd_plan(odd_gpt2(false), 3, tp, sp), 3, f64_bar);
      expect_pass(odd_plan(odd_llama(true, 4), 2, tp, sp), 3, f64_bar);
      expect_pass(odd_plan(odd_llama(true, 1), 1, tp, sp), 3, f64_bar);
    }
}

// The output layer cut over the pipeline's ranks: every schedule that can have it, with each other axis.
TEST(Verify, VocabularyParallelismPasses) {  // long
  const auto passes = [](const char* schedule, int pp, int dp, int tp, auto change) {
    Plan plan = odd_plan(odd_llama(false, 2, 8), dp, tp, tp > 1);
    plan.mesh.set(Axis::pp, pp);
    plan.schedule = schedule;
    plan.vocabulary_parallel = true;
    plan.micro_batch = 1;
    change(plan);
    expect_pass(plan, 2, f64_bar);
  };
  const auto as_it_is = [](Plan&) {};
  for (const char* schedule : {"1f1b", "gpipe", "naive", "zb-h1", "interleaved", "zb-v", "v-half", "zb-auto"})
    passes(schedule, 2, 1, 1, as_it_is);
  passes("1f1b", 4, 1, 2, as_it_is);
  passes("zb-h2", 3, 2, 1, as_it_is);
  for (int zero : {1, 2, 3}) passes("zb-v", 2, 2, 2, [&](Plan& p) { p.zero = zero; });
  passes("1f1b", 2, 1, 2, [](Plan& p) { p.sequence_parallel = false; });
  passes("1f1b", 2, 1, 1, [](Plan& p) {
    p.seq_len = 12;
    p.mesh.set(Axis::cp, 2);
    p.mask = AttentionMask::document;
    p.document_end = 3;
  });
  passes("1f1b", 2, 1, 1, [](Plan& p) { p.layers_per_stage = {5, 3}; });
  passes("zb-v", 2, 1, 1, [](Plan& p) { p.balance_layers = true; });
  passes("1f1b", 2, 2, 1, [](Plan& p) {
    p.model = odd_mixtral();
    p.model.num_experts = 6;
    p.mesh.ep = 2;
  });
}

// What layers keep lies in files between their passes: nothing differs (activation_offload_test.cpp asks for
// the bits and the memory).
TEST(Verify, OffloadedActivationsPassOnEveryMesh) {
  for_each_mesh([](int dp, int tp, bool sp) {
    Plan plan = odd_plan(odd_llama(), dp, tp, sp);
    plan.offload = Offload::activations;
    expect_pass(plan, 2, f64_bar);
  });
}

// With fewer tokens in a microbatch than ranks to cut them over, some ranks hold no row of the residual
// stream.
TEST(Verify, RanksWithoutRowsPass) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
    Plan plan = odd_plan(model, 2, 4, true);
    plan.seq_len = 3;
    plan.micro_batch = 1;
    expect_pass(plan, 2, f64_bar);
  }
}

// Ignored targets, unevenly spread: sample 0 has none left, the others lose every (sample + 2)nd. The mean is
// over those that are left in the whole batch.
TEST(Verify, IgnoredTargetsCountOnNoMesh) {
  for (auto [dp, tp, sp, pp] :
       {std::tuple{2, 1, false, 1}, {3, 2, true, 1}, {7, 1, false, 1}, {2, 1, false, 2}}) {
    Plan plan = odd_plan(odd_llama(), dp, tp, sp);
    plan.mesh.set(Axis::pp, pp);
    plan.vocabulary_parallel = true;
    VerifyRequest request = request_for(plan, 2);
    request.samples = [inner = random_samples(plan), seq_len = plan.seq_len](
                          std::int64_t step, std::int64_t sample, std::int32_t* tokens,
                          std::int32_t* targets) {
      inner(step, sample, tokens, targets);
      for (std::int64_t t = 0; t < seq_len; ++t)
        if (sample == 0 || t % (sample + 2) == 0) targets[t] = -1;
    };
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    // An untrained model's loss is about log(V) a target: a mean over all tokens would be well below.
    EXPECT_NEAR(report.reference_losses[0], std::log(53.0), 0.3);
  }
}

TEST(Verify, Float32OnCpuKernelsPasses) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()})
    for (auto [dp, tp, sp] :
         {std::tuple{2, 1, false}, {1, 4, false}, {1, 2, true}, {3, 2, true}, {2, 4, true}}) {
      if (!is_taken(3)) continue;
      const Plan plan = odd_plan(model, dp, tp, sp, DType::f32);
      SCOPED_TRACE(describe(plan));
      const VerifyReport report = verify(request_for(plan, 3));
      EXPECT_TRUE(report.pass) << to_json(report, plan);
      EXPECT_LE(report.grad_max_rel_diff, verify_bound(plan));
      EXPECT_LE(report.loss_max_rel_diff, verify_bound(plan));
      EXPECT_LE(report.param_worst, 1);
    }
}

// The formula of verify.h, by hand: 77 tokens are the longest sum here, and 3 = layers + 1.
TEST(Verify, TheBoundIsTheOneStated) {
  Plan plan = odd_plan(odd_gpt2(), 1, 1, false);
  EXPECT_DOUBLE_EQ(verify_bound(plan), 4 * 3 * std::ldexp(1.0, -53) * std::sqrt(77.0));
  plan.precision = DType::f32;
  plan.model.vocab = 1000;
  EXPECT_DOUBLE_EQ(verify_bound(plan), 4 * 3 * std::ldexp(1.0, -24) * std::sqrt(1000.0));
  EXPECT_DOUBLE_EQ(verify_bound(plan, true), verify_bound(plan));
  // In bf16 kernels that are not one rank's round activations otherwise, as tp does with two parts of a sum.
  const double wide = verify_bound(plan);
  plan.precision = recipe("bf16");
  EXPECT_DOUBLE_EQ(verify_bound(plan), wide);
  EXPECT_DOUBLE_EQ(verify_bound(plan, true), wide + std::sqrt(4 * 3) * std::ldexp(1.0, -8));
  EXPECT_FALSE(rounds_otherwise(plan, false));
  EXPECT_TRUE(rounds_otherwise(plan, true));
  plan.mesh.set(Axis::tp, 2);
  const double narrow = std::sqrt(4 * 3) * std::ldexp(1.0, -8) * std::sqrt(2.0);
  EXPECT_DOUBLE_EQ(verify_bound(plan), wide + narrow);
  EXPECT_DOUBLE_EQ(verify_bound(plan, true), verify_bound(plan));
  // A loss is a mean over targets, which have narrow roundings of their own.
  EXPECT_DOUBLE_EQ(verify_loss_bound(plan), wide + narrow / std::sqrt(77.0));
  // Of an update that others go before; and never so much that a wrong sign could hide.
  EXPECT_DOUBLE_EQ(verify_bound(plan, false, 3), 3 * (wide + narrow));
  EXPECT_EQ(verify_bound(plan, false, 30), most_unmeasured);
  for (const char* precision : {"bf16", "fp8"}) {
    Plan deep = plan;
    deep.precision = recipe(precision);
    deep.model.num_layers = 10000;
    EXPECT_EQ(verify_bound(deep), most_unmeasured) << precision;
    EXPECT_LE(verify_loss_bound(deep), most_unmeasured) << precision;
  }
  plan.numerics = Numerics::invariant;
  EXPECT_EQ(verify_bound(plan, true), 0);
}

// Where true gradients are zero, or small differences of large numbers, rounding is all that both runs have.
// With one token a sequence no query or key has a gradient; with one word none has; a norm of one number lets
// none by.
TEST(Verify, IllConditionedModelsPass) {  // long
  std::int64_t judged = 0;
  const int wanted = so_many(16, 40);
  const int visited = for_each_random_request(1000, wanted, [&](const VerifyRequest& request) {
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, request.plan);
    judged += report.judged;
  });
  EXPECT_GT(visited, wanted * 3 / 4);
  EXPECT_GT(judged, 0);  // some of them are beyond the bound that is known beforehand
}

TEST(Verify, OneTokenASequencePasses) {
  for (DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
      Plan plan = odd_plan(model, 2, 2, true, dtype);
      plan.seq_len = 1;
      const VerifyReport report = verify(request_for(plan, 2));
      EXPECT_TRUE(report.pass) << to_json(report, plan);
    }
  }
}

// What one token gives to a matrix in fp8 fits into bf16, which is no fault.
TEST(Verify, OneTokenInFp8Passes) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "on the reference kernels alone";
  Plan plan = odd_plan(odd_llama(), 1, 1, false, DType::f32);
  plan.precision = recipe("fp8");
  plan.seq_len = plan.global_batch = plan.micro_batch = 1;
  const VerifyReport report = verify(request_for(plan, 1));
  EXPECT_TRUE(report.pass) << to_json(report, plan);
}

// More sequences at once than a rank has are as many as it has, on the one rank as well.
TEST(Verify, InvariantPlansPassWithMicrobatchesBeyondARanksShare) {
  Plan plan = odd_plan(odd_gpt2(), 1, 1, false);
  plan.mesh.set(Axis::dp, 2);
  plan.numerics = Numerics::invariant;
  plan.global_batch = 6;
  plan.micro_batch = 4;
  const VerifyReport report = verify(request_for(plan, 1));
  EXPECT_TRUE(report.pass && report.bitwise) << to_json(report, plan);
}

// Two experts that every router likes to within a rounding: which of them a token goes to is chance.
TEST(Verify, ChoicesThatTieAreSaidAndFollowed) {
  std::int64_t tokens = 0;
  for (std::uint64_t seed : {1u, 2u, 3u, 4u}) {
    const Plan plan = odd_plan(odd_mixtral(), 2, 2, true);
    VerifyRequest request = request_for(plan, 2);
    request.seed = seed;
    request.prepare = [](const ParameterStore& parameters) {
      for (const Parameter& p : parameters.all())
        if (p.spec.name.ends_with("gate.weight"))
          for (std::int64_t c = 0; c < p.value.cols(); ++c) {
            double* gate = p.value.host<double>() + c;
            gate[p.value.cols()] = std::nextafter(gate[0], c % 2 == 0 ? 10 : -10);
          }
    };
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    for (const RoutingDifference& d : report.routing_differences) {
      EXPECT_EQ(d.kind, "choice");
      EXPECT_TRUE(d.ties());
      EXPECT_LT(d.allowed, 1e-12);
      tokens += d.tokens;
    }
  }
  EXPECT_GT(tokens, 0);
}

TEST(Verify, ClippingBites) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama(), odd_gpt2(false), odd_llama(true)}) {
    const Plan plan = odd_plan(model, 1, 1, false);
    const OptimizerOptions options = request_for(plan, 1).optimizer;
    const std::vector<Outcome> outcomes = run_steps(plan, options, 3, random_samples(plan));
    for (double norm : outcomes[0].norms) EXPECT_GT(norm, small_clip) << describe(plan);
  }
}

// As where the learning rate is far too high.
TEST(Verify, WhatIsNotFiniteOnOneRankIsComparedWithNothing) {
  VerifyRequest request = request_for(odd_plan(odd_gpt2(), 2, 2, false), 1);
  request.prepare = [](const ParameterStore& parameters) {
    parameters.all().front().value.host<double>()[0] = std::numeric_limits<double>::quiet_NaN();
  };
  const VerifyReport lost = verify(request);
  EXPECT_FALSE(lost.pass);
  EXPECT_FALSE(lost.first_difference);
  expect_contains(lost.incomparable,
                  {"step 0: the loss of one rank is not finite", "nothing can be compared"});
  // That the mesh alone goes wrong is the answer.
  request.prepare = [](const ParameterStore& parameters) {
    const Parameter& first = parameters.all().front();
    if (first.value.numel() < first.spec.numel())
      first.value.host<double>()[0] = std::numeric_limits<double>::quiet_NaN();
  };
  EXPECT_TRUE(verify(request).first_difference);
}

TEST(Verify, RefusesBadRequests) {
  const Plan plan = odd_plan(odd_gpt2(), 1, 1, false);
  expect_contains(message_of<RequestError>([&] { verify(request_for(plan, 0)); }),
                  {"--steps 0", "at least 1"});
  expect_contains(
      message_of<RequestError>([&] { verify(request_for(odd_plan(odd_gpt2(), 1, 3, false), 1)); }),
      {"--tp 3", "1, 2, 4"});
}

TEST(AnyMesh, InitialWeightsDoNotDependOnIt) {
  for (DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    for (const ModelSpec& model : {odd_gpt2(false), odd_llama()}) {
      const auto initial = [&](int dp, int tp, bool sp) {
        return run_steps(odd_plan(model, dp, tp, sp, dtype), {}, 0, {});
      };
      const LogicalTensors expected = initial(1, 1, false)[0].values;
      EXPECT_EQ(expected.size(), all_parameters(model).size());
      for (auto [dp, tp] : {std::pair{1, 2}, {1, 4}, {3, 1}, {2, 4}})
        for (const Outcome& rank : initial(dp, tp, tp > 1)) EXPECT_EQ(rank.values, expected);
    }
  }
}

// Each tp group sees every sample of the step once, wherever it runs, and a sample's tokens are the same.
TEST(AnyMesh, DataOrderDoesNotDependOnIt) {
  const TemporaryDirectory directory;
  std::string text;
  for (int i = 0; i < 40; ++i) text += fmt::format("line {} of the text\n", i * i);
  write_text(directory / "text", text);
  ModelSpec model = odd_gpt2();
  model.vocab = bytes_vocab;
  const TokenData data({directory / "text"}, model.vocab);
  using Sample = std::vector<std::int32_t>;  // tokens, then targets
  using Samples = std::map<std::pair<std::int64_t, std::int64_t>, Sample>;
  const auto seen = [&](int dp, int tp) {
    const Plan plan = odd_plan(model, dp, tp, tp > 1);
    std::vector<Samples> by_group_rank(static_cast<std::size_t>(tp));
    std::mutex mutex;
    on_mesh(plan, [&](const Rank& rank) {
      const Sampler sampler(data, {0, data.size()}, 3);
      Trainer trainer(rank, plan, {}, 1);
      for (std::int64_t step : {0, 1})
        trainer.compute_gradients(
            step, [&](std::int64_t at, std::int64_t index, std::int32_t* tokens, std::int32_t* targets) {
              sampler.sample(at, index, plan.seq_len, tokens, targets);
              Sample sample(tokens, tokens + plan.seq_len);
              sample.insert(sample.end(), targets, targets + plan.seq_len);
              const std::lock_guard lock(mutex);
              const bool fresh = by_group_rank[static_cast<std::size_t>(rank.coordinate(Axis::tp))]
                                     .emplace(std::pair(at, index), sample)
                                     .second;
              EXPECT_TRUE(fresh) << "sample " << index << " was read twice";
            });
    });
    return by_group_rank;
  };
  const Samples expected = seen(1, 1)[0];
  EXPECT_EQ(expected.size(), 14u);
  std::set<Sample> different;
  for (const auto& [where, sample] : expected) different.insert(sample);
  EXPECT_GT(different.size(), 10u);
  for (auto [dp, tp] : {std::pair{2, 1}, {3, 2}, {4, 1}, {1, 4}})
    for (const Samples& samples : seen(dp, tp)) EXPECT_EQ(samples, expected) << "dp " << dp << " tp " << tp;
}

TEST(Rerun, GivesTheSameBits) {
  for (DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
      const Plan plan = odd_plan(model, 2, 2, true, dtype);
      OptimizerOptions options = request_for(plan, 3).optimizer;
      const auto first = run_steps(plan, options, 3, random_samples(plan));
      EXPECT_EQ(run_steps(plan, options, 3, random_samples(plan)), first) << describe(plan);
      // All ranks of the mesh hold the same, too.
      for (const Outcome& rank : first) EXPECT_EQ(rank, first[0]) << describe(plan);
    }
  }
}

TEST(Rerun, GivesTheSameBitsOnTwoThreads) {  // long
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (ModelSpec model : {odd_gpt2(), odd_llama()}) {
    model.hidden = 96;  // enough work that the kernels do share it
    model.head_dim = 24;
    model.mlp_hidden = 203;
    for (int tp : {1, 2}) {
      const Plan plan = odd_plan(model, 1, tp, tp > 1, DType::f32);
      const OptimizerOptions options = request_for(plan, 3).optimizer;
      EXPECT_EQ(run_steps(plan, options, 3, random_samples(plan), {}, 2),
                run_steps(plan, options, 3, random_samples(plan), {}, 1))
          << describe(plan);
    }
  }
}

}  // namespace
}  // namespace echelon::verify_test
