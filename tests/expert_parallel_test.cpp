// A mixture of experts in training: on every mesh what it is on one rank, its losses included.
#include "parallel/expert_parallel.h"

#include <gtest/gtest.h>

#include "case_choice.h"
#include "expert_runs.h"
#include "schedule/pipeline_layout.h"
#include "schedule/schedules.h"
#include "train/planted_expert.h"
#include "verify/verify.h"

namespace echelon::expert_parallel_test {
namespace {

using namespace checks;

void expect_verified(const Plan& plan, std::int64_t steps = 2) {
  if (!is_taken()) return;
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

TEST(ExpertParallel, EqualsOneRankOnExpertGroups) {
  for (auto [dp, cp, tp, ep] : {std::tuple{2, 1, 1, 2}, {4, 1, 1, 2}, {2, 2, 1, 4}, {2, 1, 2, 2}}) {
    Plan plan = odd_plan(even_deepseek(2), dp, tp, tp > 1);
    plan.mesh.set(Axis::cp, cp);
    plan.mesh.ep = ep;
    plan.seq_len = 12;
    plan.balancing = all_losses();
    for (double capacity : {0.0, 0.9}) {
      plan.balancing.capacity = capacity;
      expect_verified(plan, 1);
    }
  }
}

// What dropping leaves is the same on every mesh: losses and parameters of every rank agree with one rank's.
TEST(ExpertParallel, DropsTheSameOnEveryMesh) {
  for (DropPolicy drop : {DropPolicy::probability, DropPolicy::position}) {
    Plan plan = odd_plan(even_mixtral(2), 1, 1, false);
    plan.seq_len = 12;
    plan.global_batch = 8;
    plan.balancing = {.capacity = 0.7, .drop = drop};
    std::vector<double> expected;
    for (auto [dp, cp, tp, ep] :
         {std::tuple{1, 1, 1, 1}, {1, 1, 2, 1}, {1, 2, 1, 1}, {2, 1, 1, 2}, {2, 2, 2, 4}}) {
      plan.mesh.set(Axis::dp, dp), plan.mesh.set(Axis::cp, cp), plan.mesh.set(Axis::tp, tp);
      plan.mesh.ep = ep;
      plan.sequence_parallel = true;
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        trainer.compute_gradients(0, random_samples(plan));
        if (rank.index() > 0) return;
        std::vector<double> dropped;
        for (const RoutingCounts& layer : trainer.routing())
          dropped.insert(dropped.end(), layer.dropped.begin(), layer.dropped.end());
        if (expected.empty()) expected = dropped;
        EXPECT_EQ(dropped, expected) << describe_experts(plan);
        EXPECT_GT(*std::max_element(dropped.begin(), dropped.end()), 0);
      });
    }
  }
}

// In DualPipe's pairs one pass computes while the tokens of the other travel: neither has ended when the
// other begins. Under the same schedule without an exchange they follow each other.
TEST(ExpertParallel, PassesThatRunTogetherChangePlaces) {
  for (int ep : {1, 2}) {
    Plan plan = odd_plan(even_mixtral(2, 4), 2, 1, false);
    plan.mesh.set(Axis::pp, 2);
    plan.mesh.ep = ep;
    plan.schedule = "dualpipe";
    plan.global_batch = 24;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      const std::vector<Span>& spans = trainer.last_run().spans;
      int together = 0, apart = 0;
      for (const Span& f : spans)
        for (const Span& b : spans)
          if (f.instruction.op == Op::F && f.instruction.overlaps_next && b.instruction.op == Op::BW)
            ++(f.begin < b.end && b.begin < f.end ? together : apart);
      EXPECT_EQ(together > 0, ep > 1);
      EXPECT_GT(apart, 0);
    });
  }
}

// Every copy of a token whose expert is elsewhere travels there and back, in forward and in backward, and
// nothing else does: N k C elements each way, less what stays.
TEST(ExpertParallel, SendsWhatLeavesItsRank) {
  for (const Recompute& recompute : {Recompute::none, Recompute::full})
    for (double capacity : {0.0, 0.6})
      for (int tp : {1, 2}) {
        Plan plan = odd_plan(even_deepseek(2), 4, tp, tp > 1);
        plan.mesh.ep = 4;
        plan.recompute = recompute;
        plan.balancing.capacity = capacity;
        std::vector<Traffic> sent(static_cast<std::size_t>(plan.mesh.num_ranks()));
        double away = 0, kept = 0;
        on_mesh(plan, [&](const Rank& rank) {
          Trainer trainer(rank, plan, {}, 1);
          trainer.compute_gradients(0, random_samples(plan));
          sent[static_cast<std::size_t>(rank.index())] = rank.traffic();
          if (rank.index() > 0) return;
          for (const RoutingCounts& layer : trainer.routing()) {
            away += layer.away;
            for (std::size_t e = 0; e < layer.routed.size(); ++e) kept += layer.routed[e] - layer.dropped[e];
          }
        });
        const std::int64_t C = plan.model.hidden, E = plan.model.num_experts, layers = 2, microbatches = 1;
        EXPECT_LT(away, kept);
        EXPECT_GT(away, 0);
        // Numbers of copies, 4 bytes each to others; then rows, weights and their gradients.
        const std::int64_t again = recompute == Recompute::full ? 1 : 0;
        const std::int64_t told = layers * microbatches * (1 + again) * (E - E / 4) * 4;
        std::int64_t bytes = 0;
        for (const Traffic& traffic : sent) {
          EXPECT_EQ(traffic.at(Axis::ep, Verb::all_to_all).calls, layers * microbatches * (7 + 2 * again));
          bytes += traffic.at(Axis::ep, Verb::all_to_all).bytes - told;
        }
        EXPECT_EQ(bytes, static_cast<std::int64_t>(away) * ((4 + again) * C + 2) * 8 * tp)
            << describe_experts(plan);
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

// An expert without tokens in a step's last update has had earlier ones.
TEST(ExpertParallel, EqualsOneRankWhereTheLastUpdateLeavesExpertsOut) {  // long
  Plan plan = odd_plan(load_model("deepseek-tiny"), 1, 1, false);
  plan.mesh.set(Axis::pp, 2);
  plan.schedule = "pipedream";
  plan.seq_len = 16;
  plan.global_batch = 8;
  plan.balancing.capacity = 1;
  expect_verified(plan);
}

TEST(ExpertParallel, EqualsOneRankUnderZero) {
  for (int zero : {1, 2, 3})
    for (const Recompute& recompute : {Recompute::none, Recompute::full}) {
      Plan plan = odd_plan(odd_mixtral(), 2, 1, false);
      plan.zero = zero;
      plan.recompute = recompute;
      plan.balancing = all_losses(false);
      expect_verified(plan);
    }
}

// The gradient of cross-entropy and losses together, along random directions.
TEST(ExpertParallel, GradientsAreThoseOfTheLossWithItsBalanceTerms) {  // long
  for (const ModelSpec& model : {odd_mixtral(), odd_deepseek()})
    for (const Balancing& balancing : balancings(model)) {
      Plan plan = odd_plan(model, 1, 1, false);
      plan.balancing = balancing;
      SCOPED_TRACE(describe_experts(plan));
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        const auto total = [&] {
          double loss = trainer.compute_gradients(0, random_samples(plan));
          for (const RoutingCounts& layer : trainer.routing()) loss += layer.loss_sum;
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
      const std::vector<RoutingCounts>& layers = trainer.routing();
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

// Loads and losses over the mesh are those of one rank, and so are the biases that they make.
TEST(ExpertParallel, CountsAreTheSameOnEveryMesh) {
  Plan plan = odd_plan(odd_deepseek(4), 1, 1, false);
  plan.global_batch = 12;
  plan.seq_len = 12;
  plan.balancing = all_losses();
  plan.balancing.bias_rate = 0.05;
  const auto counted = [](const Plan& p) {
    std::vector<std::vector<RoutingCounts>> of_rank(static_cast<std::size_t>(p.mesh.num_ranks()));
    on_mesh(p, [&](const Rank& rank) {
      Trainer trainer(rank, p, {}, 1);
      for (std::int64_t step = 0; step < 3; ++step) trainer.step(step, random_samples(p), 3 - step);
      of_rank[static_cast<std::size_t>(rank.index())] = trainer.routing();
    });
    return of_rank;
  };
  const std::vector<RoutingCounts> expected = counted(plan).front();
  for (auto [dp, tp, cp, schedule] :
       {std::tuple{2, 2, 1, "zb-v"}, {1, 2, 2, "1f1b"}, {2, 1, 1, "dualpipe"}}) {
    Plan mesh = plan;
    mesh.mesh.set(Axis::dp, dp), mesh.mesh.set(Axis::tp, tp), mesh.mesh.set(Axis::cp, cp);
    mesh.mesh.set(Axis::pp, 2);
    mesh.sequence_parallel = true;
    mesh.schedule = schedule;
    if (dp * 2 == 4) mesh.micro_batch = 1;
    for (const std::vector<RoutingCounts>& counts : counted(mesh)) {
      ASSERT_EQ(counts.size(), expected.size());
      for (std::size_t i = 0; i < counts.size(); ++i) {
        EXPECT_EQ(counts[i].layer, expected[i].layer);
        EXPECT_EQ(counts[i].routed, expected[i].routed) << schedule;
        EXPECT_NEAR(counts[i].loss_sum, expected[i].loss_sum, 1e-12 * expected[i].loss_sum);
      }
    }
  }
}

// Most tokens prefer one expert: losses and biases each spread them, and without them nothing does. Loads of
// the last 25 of 200 steps together, 800 tokens an expert: their noise is some 4%.
double imbalance_after_planting(const Balancing& balancing) {
  constexpr std::int64_t steps = 200, counted = 25;
  Plan plan = odd_plan(odd_mixtral(1), 1, 1, false);
  plan.model.num_experts = 8;
  plan.model.init_std = 0.2;
  plan.seq_len = 16;
  plan.micro_batch = plan.global_batch = 8;
  plan.balancing = balancing;
  std::vector<double> tokens(8);
  on_mesh(plan, [&](const Rank& rank) {
    OptimizerOptions options;
    options.lr = 3e-3;
    options.total_steps = steps;
    Trainer trainer(rank, plan, options, 1);
    plant_expert(trainer.parameters(), plan.model, {0, 4});
    for (std::int64_t step = 0; step < steps; ++step) {
      trainer.step(step, random_samples(plan), steps - step);
      for (std::size_t e = 0; e < 8 && step >= steps - counted; ++e)
        tokens[e] += trainer.routing().front().routed[e];
    }
  });
  return 8 * *std::max_element(tokens.begin(), tokens.end()) / static_cast<double>(counted * 8 * 16 * 2);
}

TEST(ExpertParallel, BalancingSpreadsAPlantedPreference) {  // long
  EXPECT_GT(imbalance_after_planting({}), 2);
  EXPECT_LT(imbalance_after_planting({.expert_loss = 0.3}), 1.3);
  EXPECT_LT(imbalance_after_planting({.bias_rate = 0.01}), 1.3);
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
  plan = odd_plan(even_mixtral(2), 4, 1, false);
  plan.mesh.ep = 3;
  refusal(plan, {"--ep 3", "8 experts", "legal: 1, 2, 4"});
  plan.mesh.ep = 16;
  refusal(plan, {"--ep 16", "legal: 1, 2, 4"});
  plan.mesh.ep = 4;
  plan.zero = 1;
  plan.hsdp = 2;
  refusal(plan, {"--ep 4", "--hsdp 2", "legal: 1, 2"});
  plan.zero = 0, plan.hsdp = 1;
  plan.compression = parse_compression("int8", "--compress");
  refusal(plan, {"--compress int8", "--ep is 4", "legal: none, or --ep 1"});
  Plan dense = odd_plan(odd_llama(), 1, 1, false);
  dense.balancing.expert_loss = 0.1;
  refusal(dense, {"--aux-loss 0.1", "no experts"});
  dense.balancing = {};
  dense.mesh.set(Axis::dp, 2);
  dense.mesh.ep = 2;
  refusal(dense, {"--ep 2", "no experts"});
  Plan stream = odd_plan(odd_mixtral(), 1, 1, false);
  stream.mesh.set(Axis::pp, 2);
  stream.schedule = "pipedream";
  stream.global_batch = 8;
  stream.balancing = {.z_loss = 0.1};
  expect_contains(message_of<RequestError>([&] { PipelineLayout{stream}; }),
                  {"--z-loss 0.1", "pipedream", "legal: 0, or --schedule 1f1b"});
}

}  // namespace
}  // namespace echelon::expert_parallel_test
