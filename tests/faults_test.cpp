// verify itself, proven: errors planted in the mesh are caught at the first step, and named.
#include "parallel/faults.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "case_choice.h"
#include "random_models.h"
#include "verify/verify.h"

namespace echelon::faults_test {
namespace {

using namespace checks;

VerifyReport verify_with(const Plan& plan, const Faults& faults) {
  VerifyRequest request;
  request.plan = plan;
  request.optimizer.warmup_steps = 0;
  request.run.timeout = patience;
  request.steps = 2;
  request.faults = faults;
  return verify(request);
}

std::vector<Plan> plans(int dp, int tp, bool sp) {
  return {odd_plan(odd_gpt2(), dp, tp, sp), odd_plan(odd_llama(), dp, tp, sp)};
}

const ParamSpec& declared(const ModelSpec& model, const std::string& name) {
  static std::vector<ParamSpec> list;
  list = all_parameters(model);
  for (const ParamSpec& spec : list)
    if (spec.name == name) return spec;
  throw InvariantError("no parameter " + name);
}

Faults forgotten_norms() {
  Faults faults;
  faults.forget_norm_reduction = true;
  return faults;
}

TEST(Faults, NoneIsFoundWhereNoneIsPlanted) {
  for (const Plan& plan : plans(2, 2, true)) {
    const VerifyReport report = verify_with(plan, {});
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    EXPECT_FALSE(report.first_difference);
  }
}

TEST(Faults, AForgottenNormReductionIsNamed) {
  for (auto [dp, tp] : {std::pair{1, 2}, {2, 2}, {1, 4}})
    for (const Plan& plan : plans(dp, tp, true)) {
      SCOPED_TRACE(describe(plan));
      const VerifyReport report = verify_with(plan, forgotten_norms());
      EXPECT_FALSE(report.pass);
      ASSERT_TRUE(report.first_difference);
      const Difference& first = *report.first_difference;
      EXPECT_EQ(first.kind, "grad");
      EXPECT_EQ(first.step, 0);
      EXPECT_GT(first.rel_diff, report.bound);
      EXPECT_TRUE(declared(plan.model, first.tensor).rows_are_sequence_sharded) << first.tensor;
      // The first of them in model order.
      EXPECT_EQ(first.tensor, plan.model.family == Family::gpt2 ? "transformer.wpe.weight"
                                                                : "model.layers.0.input_layernorm.weight");
      EXPECT_LE(report.loss_max_rel_diff, 1);  // the second step's loss may differ
    }
}

// The gradients that differ are those of the sequence-sharded parameters, all of them and no other.
TEST(Faults, AForgottenNormReductionChangesExactlyTheSequenceShardedGradients) {
  for (const Plan& plan : plans(2, 2, true)) {
    const auto right = run_steps(plan, {}, 1, random_samples(plan));
    const auto wrong = run_steps(plan, {}, 1, random_samples(plan), forgotten_norms());
    std::set<std::string> sharded_names, differing;
    for (const ParamSpec& spec : all_parameters(plan.model))
      if (spec.rows_are_sequence_sharded) sharded_names.insert(spec.name);
    for (const auto& [name, gradient] : right[0].gradients)
      if (gradient != wrong[0].gradients.at(name)) differing.insert(name);
    EXPECT_EQ(differing, sharded_names) << describe(plan);
    // Seven in each gpt2 block with its biases after the row-parallel products, two in each Llama block.
    EXPECT_EQ(sharded_names.size(), plan.model.family == Family::gpt2 ? 2 * 6 + 3u : 2 * 2 + 1u);
  }
}

// Without sequence parallelism nothing needs that reduction.
TEST(Faults, AForgottenNormReductionIsHarmlessWithoutSequenceParallelism) {
  for (const Plan& plan : plans(1, 2, false)) EXPECT_TRUE(verify_with(plan, forgotten_norms()).pass);
}

TEST(Faults, AWrongLossScaleIsNamed) {  // long
  Faults faults;
  faults.loss_scale = 1.5;
  for (auto [dp, tp, sp] : {std::tuple{3, 1, false}, {1, 2, true}, {2, 2, false}})
    for (const Plan& plan : plans(dp, tp, sp)) {
      SCOPED_TRACE(describe(plan));
      const VerifyReport report = verify_with(plan, faults);
      EXPECT_FALSE(report.pass);
      ASSERT_TRUE(report.first_difference);
      EXPECT_EQ(report.first_difference->kind, "grad");
      EXPECT_EQ(report.first_difference->step, 0);
      EXPECT_EQ(report.first_difference->tensor, all_parameters(plan.model).front().name);
      EXPECT_NEAR(report.first_difference->rel_diff, 0.5, 1.5 * report.bound);
      EXPECT_EQ(report.reference_losses.size(), 2u);
    }
}

TEST(Faults, AShiftedVocabularyIsNamed) {  // long
  Faults faults;
  faults.vocabulary_shift = 1;
  for (auto [dp, tp, sp] : {std::tuple{1, 2, false}, {2, 2, true}, {1, 4, true}})
    for (const Plan& plan : plans(dp, tp, sp)) {
      SCOPED_TRACE(describe(plan));
      const VerifyReport report = verify_with(plan, faults);
      EXPECT_FALSE(report.pass);
      ASSERT_TRUE(report.first_difference);
      EXPECT_EQ(report.first_difference->kind, "grad");
      EXPECT_EQ(report.first_difference->step, 0);
      EXPECT_EQ(report.first_difference->tensor, all_parameters(plan.model).front().name);  // the table
      EXPECT_GT(report.first_difference->rel_diff, 0.01);
      EXPECT_GT(report.loss_max_rel_diff, report.bound);
    }
}

TEST(Faults, AShardThatIsOffByOneIsNamed) {  // long
  Faults faults;
  faults.shard_shift = 1;
  for (int zero : {0, 1, 2, 3})
    for (Plan plan : plans(3, 2, true)) {
      plan.zero = zero;
      SCOPED_TRACE(fmt::format("zero {} {}", zero, describe(plan)));
      const VerifyReport report = verify_with(plan, faults);
      EXPECT_EQ(report.pass, zero == 0);  // where nothing is cut, nothing can be off
      if (zero == 0) continue;
      ASSERT_TRUE(report.first_difference);
      EXPECT_EQ(report.first_difference->kind, "grad");
      EXPECT_EQ(report.first_difference->step, 0);
      EXPECT_GT(report.first_difference->rel_diff, 0.01);
    }
}

TEST(Faults, ChoicesThatDoNotTieAreNamed) {
  Faults faults;
  faults.router_bias = 0.01;
  for (const ModelSpec& model : {odd_mixtral(), odd_deepseek()}) {
    const Plan plan = odd_plan(model, 2, 2, true);
    const VerifyReport report = verify_with(plan, faults);
    EXPECT_FALSE(report.pass);
    ASSERT_TRUE(report.first_difference);
    // With the mesh's choices everything else is equal.
    EXPECT_EQ(report.first_difference->kind, "choice");
    EXPECT_EQ(report.first_difference->step, 0);
    EXPECT_EQ(report.first_difference->tensor, model.experts == Experts::mixtral
                                                   ? "model.layers.0.block_sparse_moe.gate.weight"
                                                   : "model.layers.1.mlp.gate.weight");
    EXPECT_LE(report.grad_max_rel_diff, report.bound);
    const RoutingDifference& first = report.routing_differences.front();
    EXPECT_FALSE(first.ties());
    EXPECT_GT(first.tokens, 0);
    EXPECT_LE(first.shift, 0.005 * 1.001);  // half of what was added
    EXPECT_LT(first.allowed, 1e-12);
  }
}

// Ill-conditioned tensors have room for rounding; errors show in those beside them.
TEST(Faults, AreCaughtInIllConditionedModels) {
  const auto caught = [](VerifyRequest request, const Faults& faults) {
    request.faults = faults;
    const VerifyReport report = verify(request);
    EXPECT_FALSE(report.pass) << to_json(report, request.plan);
    EXPECT_TRUE(report.first_difference);
  };
  Faults scale, words;
  scale.loss_scale = 1.01;
  words.vocabulary_shift = 1;
  for_each_random_request(1000, 40, [&](const VerifyRequest& request) {
    if (request.plan.model.vocab == 1 || !is_taken()) return;  // every gradient is zero, scaled or not
    if (!flushes(request.plan) || !request.plan.optimizer_barrier)
      return;  // compared after steps, by AdamW's signs
    caught(request, scale);
    if (request.plan.mesh.size(Axis::tp) > 1) caught(request, words);
  });
}

TEST(Report, HasTheFieldsThatProgramsReadWhenItPasses) {
  const Plan plan = odd_plan(odd_llama(), 2, 2, true);
  const VerifyReport report = verify_with(plan, {});
  const auto json = nlohmann::json::parse(to_json(report, plan));
  EXPECT_EQ(json.at("pass"), true);
  EXPECT_EQ(json.at("ranks"), 4);
  EXPECT_EQ(json.at("steps"), 2);
  EXPECT_TRUE(json.at("bitwise").is_boolean());
  EXPECT_EQ(json.at("loss_max_rel_diff"), report.loss_max_rel_diff);
  EXPECT_EQ(json.at("grad_max_rel_diff"), report.grad_max_rel_diff);
  EXPECT_EQ(json.at("param_max_rel_diff"), report.param_max_rel_diff);
  EXPECT_EQ(json.at("bound"), verify_bound(plan));
  EXPECT_EQ(json.at("loss_bound"), verify_loss_bound(plan));
  EXPECT_TRUE(json.at("first_difference").is_null());
  EXPECT_TRUE(json.at("judged_by_rounding").is_null());
  EXPECT_TRUE(json.at("routing_differences").empty());
  EXPECT_EQ(json.at("mesh"), (nlohmann::json{{"pp", 1}, {"dp", 2}, {"cp", 1}, {"tp", 2}, {"ep", 1}}));
  EXPECT_EQ(json.at("reference_losses"), report.reference_losses);
  EXPECT_EQ(json.at("mesh_losses"), report.mesh_losses);
  EXPECT_EQ(report.mesh_losses.size(), 2u);
}

TEST(Report, NamesTheFirstDifference) {
  const Plan plan = odd_plan(odd_llama(), 1, 2, true);
  const VerifyReport report = verify_with(plan, forgotten_norms());
  const auto json = nlohmann::json::parse(to_json(report, plan));
  EXPECT_EQ(json.at("pass"), false);
  const auto& first = json.at("first_difference");
  EXPECT_EQ(first.at("step"), 0);
  EXPECT_EQ(first.at("kind"), "grad");
  EXPECT_EQ(first.at("tensor"), "model.layers.0.input_layernorm.weight");
  EXPECT_EQ(first.at("rel_diff"), report.first_difference->rel_diff);
}

// A gradient that is not a number is a difference as well, and still valid JSON.
TEST(Report, ADifferenceThatIsNotANumberIsFound) {
  Faults faults;
  faults.loss_scale = std::numeric_limits<double>::quiet_NaN();
  const Plan plan = odd_plan(odd_gpt2(), 2, 1, false);
  const VerifyReport report = verify_with(plan, faults);
  EXPECT_FALSE(report.pass);
  ASSERT_TRUE(report.first_difference);
  EXPECT_EQ(report.first_difference->kind, "grad");
  EXPECT_EQ(report.first_difference->step, 0);
  const auto json = nlohmann::json::parse(to_json(report, plan));
  EXPECT_TRUE(json.at("first_difference").at("rel_diff").is_number());
}

}  // namespace
}  // namespace echelon::faults_test
