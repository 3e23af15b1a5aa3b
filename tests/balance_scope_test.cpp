// Balance losses over the global batch: as on one rank that has the batch in one microbatch, or refused.
#include <gtest/gtest.h>

#include "expert_runs.h"
#include "schedule/pipeline_layout.h"
#include "verify/verify.h"

namespace echelon::balance_scope_test {
namespace {

using namespace checks;

Plan batch_plan(const ModelSpec& model, int dp = 1, int tp = 1, int pp = 1, int cp = 1) {
  Plan plan = odd_plan(model, dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.mesh.set(Axis::cp, cp);
  plan.seq_len = 12;
  plan.micro_batch = 7;  // one a rank
  plan.balancing = all_losses(model.router.groups > 1);
  plan.balancing.scope = BalanceScope::batch;
  return plan;
}

void expect_verified(const Plan& plan) {
  VerifyRequest request;
  request.plan = plan;
  request.steps = request.optimizer.total_steps = 2;
  SCOPED_TRACE(describe_experts(plan));
  const VerifyReport report = verify(request);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
}

TEST(BalanceScope, OfTheBatchIsTheSameOnEveryMesh) {  // long
  for (const ModelSpec& model : {odd_mixtral(), odd_deepseek()})
    for (auto [dp, tp, pp, cp] : {std::tuple{3, 1, 1, 1}, {2, 2, 1, 1}, {1, 1, 2, 1}, {2, 2, 2, 2}}) {
      Plan plan = batch_plan(model, dp, tp, pp, cp);
      expect_verified(plan);
      if (cp > 1) continue;
      plan.recompute = Recompute::full;
      plan.zero = dp > 1 ? 3 : 0;
      expect_verified(plan);
    }
  Plan groups = batch_plan(even_deepseek(2), 2);
  groups.mesh.ep = 2;
  expect_verified(groups);
}

// Where all forward passes come first there may be several microbatches.
TEST(BalanceScope, OfTheBatchTakesMicrobatchesThatComeFirst) {  // long
  for (auto [dp, tp] : {std::pair{1, 1}, {2, 2}})
    for (const Recompute& recompute : {Recompute::none, Recompute::full}) {
      Plan plan = batch_plan(odd_deepseek(4), dp, tp, 2);
      plan.schedule = "gpipe";
      plan.micro_batch = 2;
      plan.global_batch = 6 * dp;
      plan.recompute = recompute;
      expect_verified(plan);
    }
}

struct Gradients {
  double loss = 0;
  std::vector<double> balance_losses;
  LogicalTensors gradients;
};

// Step 1, after another one and an evaluation, whose tokens do not count.
Gradients gradients_of(const Plan& plan, bool in_second_step = false) {
  Gradients result;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    if (in_second_step) {
      trainer.compute_gradients(0, random_samples(plan));
      trainer.evaluate(4, random_samples(plan));
    }
    result.loss = trainer.compute_gradients(1, random_samples(plan));
    for (const RoutingCounts& layer : trainer.routing()) result.balance_losses.push_back(layer.loss_sum);
    result.gradients = gather(rank, trainer, ParameterTensor::gradient);
  });
  return result;
}

// One microbatch that is the batch is one scope by either name, to the bit; sequences are others.
TEST(BalanceScope, OfTheBatchIsThatOfOneMicrobatchWithAllOfIt) {
  Plan plan = batch_plan(odd_deepseek());
  const Gradients batch = gradients_of(plan), again = gradients_of(plan, true);
  plan.balancing.scope = BalanceScope::microbatch;
  const Gradients microbatch = gradients_of(plan);
  EXPECT_EQ(batch.balance_losses, microbatch.balance_losses);
  EXPECT_TRUE(batch.gradients == microbatch.gradients);
  EXPECT_TRUE(batch.gradients == again.gradients);
  plan.balancing.scope = BalanceScope::sequence;
  EXPECT_NE(gradients_of(plan).balance_losses, batch.balance_losses);
}

TEST(BalanceScope, OfTheBatchIsRefusedWhereItIsNotKnownInTime) {
  const auto refusal = [](const Plan& plan, const std::vector<std::string>& parts) {
    std::vector<std::string> all{"--balance-scope batch", "legal: "};
    all.insert(all.end(), parts.begin(), parts.end());
    expect_contains(message_of<RequestError>([&] {
                      validate(plan);
                      PipelineLayout{plan};
                    }),
                    all);
  };
  Plan plan = batch_plan(odd_deepseek(4), 1, 1, 2);
  plan.micro_batch = 2;
  plan.global_batch = 8;
  refusal(plan, {"1f1b", "4 microbatches", "--schedule gpipe"});
  plan.schedule = "zb-h1";
  refusal(plan, {"zb-h1"});
  plan.schedule = "dualpipe";
  refusal(plan, {"dualpipe", "two ranks"});
  plan.schedule = "gpipe";
  EXPECT_NO_THROW(PipelineLayout{plan});
  plan.optimizer_barrier = false;
  refusal(plan, {"--optimizer-barrier off"});
  Plan alone = batch_plan(odd_deepseek());
  alone.micro_batch = 2;
  refusal(alone, {"one pipeline rank", "--micro-batch"});
  alone.balancing.expert_loss = alone.balancing.device_loss = alone.balancing.communication_loss = 0;
  EXPECT_NO_THROW(PipelineLayout{alone});  // the z-loss counts nothing
  Plan uneven = batch_plan(odd_deepseek(), 2);
  uneven.micro_batch = 3;  // 4 and 3 sequences
  refusal(uneven, {"--dp 2", "some ranks have more"});
  Plan capacity = batch_plan(odd_deepseek());
  capacity.balancing.capacity = 1;
  refusal(capacity, {"--capacity 1"});
}

}  // namespace
}  // namespace echelon::balance_scope_test
