// A mixture of experts in training: on every mesh what it is on one rank, its losses included.
#include "parallel/expert_parallel.h"

#include <gtest/gtest.h>

#include "expert_runs.h"
#include "schedule/pipeline_layout.h"
#include "schedule/schedules.h"
#include "train/verify.h"

namespace echelon {
namespace {

using namespace checks;

void expect_verified(const Plan& plan, std::int64_t steps = 2) {
  VerifyRequest request;
  request.plan = plan;
  request.steps = steps;
  request.optimizer.total_steps = steps;
  if (!flushes(plan)) request.optimizer.clip = 0;
  SCOPED_TRACE(describe_experts(plan));
  const VerifyReport report = verify(request);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  // One that takes part in nothing would pass as well.
  EXPECT_GT(report.reference_losses.front(), 0);
}

TEST(ExpertParallel, EqualsOneRankOnEveryMesh) {
  for (const ModelSpec& model : {odd_mixtral(), odd_deepseek()})
    for (const Balancing& balancing : balancings(model))
      for (auto [dp, tp, sp] :
           {std::tuple{2, 1, false}, {1, 2, false}, {1, 2, true}, {3, 2, true}, {1, 4, true}}) {
        Plan plan = odd_plan(model, dp, tp, sp);
        plan.balancing = balancing;
        if (balancing.scope == BalanceScope::microbatch) plan.global_batch = 4 * dp;
        expect_verified(plan, 1);
      }
}

TEST(ExpertParallel, EqualsOneRankUnderContextParallelism) {
  for (ContextKind kind : {ContextKind::ring, ContextKind::ulysses})
    for (BalanceScope scope : {BalanceScope::sequence, BalanceScope::microbatch}) {
      Plan plan = odd_plan(odd_deepseek(), 1, 1, false);
      plan.mesh.set(Axis::cp, 2);
      plan.context_kind = kind;
      plan.seq_len = 12;
      plan.balancing = all_losses();
      plan.balancing.scope = scope;
      expect_verified(plan);
      if (scope == BalanceScope::microbatch) continue;
      plan.mesh.set(Axis::dp, 2);
      plan.mesh.set(Axis::tp, 2);
      plan.sequence_parallel = true;
      expect_verified(plan, 1);
    }
}

TEST(ExpertParallel, EqualsOneRankUnderEverySchedule) {
  for (const std::string& schedule : schedule_names()) {
    Plan plan = odd_plan(odd_deepseek(5), 1, 1, false);
    plan.mesh.set(Axis::pp, 2);
    plan.schedule = schedule;
    plan.global_batch = 12;
    if (flushes(plan)) plan.balancing = all_losses();
    plan.balancing.capacity = 1;
    expect_verified(plan);
  }
}

TEST(ExpertParallel, EqualsOneRankUnderZero) {
  for (int zero : {1, 2, 3})
    for (Recompute recompute : {Recompute::none, Recompute::full}) {
      Plan plan = odd_plan(odd_mixtral(), 2, 1, false);
      plan.zero = zero;
      plan.recompute = recompute;
      plan.balancing = all_losses(false);
      expect_verified(plan);
    }
}

// The gradient of cross-entropy and losses together, along random directions.
TEST(ExpertParallel, GradientsAreThoseOfTheLossWithItsBalanceTerms) {
  for (const ModelSpec& model : {odd_mixtral(), odd_deepseek()})
    for (const Balancing& balancing : balancings(model)) {
      Plan plan = odd_plan(model, 1, 1, false);
      plan.balancing = balancing;
      SCOPED_TRACE(describe_experts(plan));
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        const auto total = [&] {
          double loss = trainer.compute_gradients(0, random_samples(plan));
          for (const RoutingCounts& layer : trainer.stages().take_routing_counts())
            loss += layer.loss_sum / static_cast<double>(plan.global_batch * plan.seq_len);
          return loss;
        };
        const double middle = total();
        for (const Parameter& p : trainer.parameters().all()) {
          if (p.spec.name.find("gate.weight") == std::string::npos &&
              p.spec.name.find("experts.0") == std::string::npos &&
              p.spec.name.find("shared_experts") == std::string::npos)
            continue;
          total();
          const Tensor direction = random(rank.arena(), p.value.shape(), name_hash(p.spec.name.c_str()));
          const double slope = inner(p.gradient, direction);
          const double step = 1e-6;
          const auto move = [&](double by) {
            for_each(direction,
                     [&](std::int64_t i, std::int64_t j) { at(p.value, i, j) += by * at(direction, i, j); });
          };
          move(step);
          const double above = total();
          move(-2 * step);
          const double below = total();
          move(step);
          // Rounding of the losses over the step, and the third derivative along a direction of this length.
          const double tolerance = 100 * epsilon * std::abs(middle) / step + 1e-7 * std::abs(slope);
          EXPECT_NEAR((above - below) / (2 * step), slope, tolerance) << p.spec.name;
        }
      });
    }
}

TEST(ExpertParallel, CountsWhatIsRoutedAndDropped) {
  Plan plan = odd_plan(odd_mixtral(), 1, 1, false);
  const auto choices = static_cast<double>(plan.global_batch * plan.seq_len * plan.model.experts_per_token);
  for (double capacity : {0.0, 0.5, 1.0, 100.0}) {
    plan.balancing.capacity = capacity;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      const std::vector<RoutingCounts> layers = trainer.stages().take_routing_counts();
      ASSERT_EQ(std::ssize(layers), plan.model.num_layers);
      for (const RoutingCounts& layer : layers) {
        double routed = 0, dropped = 0;
        for (double n : layer.routed) routed += n;
        for (double n : layer.dropped) dropped += n;
        EXPECT_EQ(routed, choices);
        if (capacity == 0.5) {
          EXPECT_GE(dropped, 7 * (22 - 5 * 3));  // of 22 choices of a sequence 5 experts take 3 each
        } else if (capacity != 1) {
          EXPECT_EQ(dropped, 0);
        }
      }
    });
  }
}

TEST(ExpertParallel, RefusesWhatItCannotDoExactly) {
  const auto refusal = [](const Plan& plan, const std::vector<std::string>& parts) {
    expect_contains(message_of<RequestError>([&] { validate(plan); }), parts);
  };
  Plan plan = odd_plan(odd_mixtral(), 3, 1, false);  // 3, 2 and 2 sequences in microbatches of 2
  plan.balancing.scope = BalanceScope::microbatch;
  plan.balancing.expert_loss = 0.1;
  refusal(plan, {"--balance-scope microbatch", "--dp 3", "sequence"});
  plan.balancing = {.device_loss = 0.1};
  refusal(plan, {"--device-loss 0.1", "router_groups"});
  plan.balancing = {.z_loss = -1};
  refusal(plan, {"--z-loss -1", "from 0"});
  plan.balancing = {.capacity = 1};
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 12;
  refusal(plan, {"--capacity 1", "--cp 2"});
  Plan dense = odd_plan(odd_llama(), 1, 1, false);
  dense.balancing.expert_loss = 0.1;
  refusal(dense, {"--aux-loss 0.1", "no experts"});
  Plan stream = odd_plan(odd_mixtral(), 1, 1, false);
  stream.mesh.set(Axis::pp, 2);
  stream.schedule = "pipedream";
  stream.global_batch = 8;
  stream.balancing = {.z_loss = 0.1};
  expect_contains(message_of<RequestError>([&] { PipelineLayout{stream}; }),
                  {"--z-loss 0.1", "pipedream", "flushes"});
}

}  // namespace
}  // namespace echelon
