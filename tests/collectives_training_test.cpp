// Training over collectives that are written over messages (comm/collectives.h) instead of the direct ones.
#include <gtest/gtest.h>

#include "mesh_runs.h"
#include "train/verify.h"

namespace echelon {
namespace {

using namespace checks;

std::vector<Outcome> trained(const Plan& plan, Collectives collectives, std::int64_t steps) {
  return run_steps(plan, {}, steps, random_samples(plan), {}, 1, collectives);
}

Plan pipelined(Plan plan, const std::string& schedule) {
  plan.mesh.set(Axis::pp, 2);
  plan.schedule = schedule;
  plan.micro_batch = 1;
  plan.global_batch = 2 * plan.mesh.size(Axis::dp) * plan.mesh.size(Axis::pp);
  return plan;
}

// Halving-doubling groups its sums as the direct form does, for every number of ranks.
TEST(CollectivesTraining, HalvingDoublingGivesTheBitsOfTheDirectForm) {
  for (auto [dp, tp] : {std::pair{2, 1}, {3, 1}, {5, 1}, {1, 4}, {3, 4}, {6, 2}}) {
    const Plan plan = odd_plan(odd_gpt2(), dp, tp, false);
    EXPECT_TRUE(trained(plan, Collectives::direct, 2) == trained(plan, Collectives::halving_doubling, 2))
        << describe(plan);
  }
}

// What regroups sums agrees within the bound of verify, on every rank, whatever the mesh and the schedule;
// and finishes.
TEST(CollectivesTraining, EveryAlgorithmTrainsOnEveryMesh) {
  std::vector<Plan> plans{odd_plan(odd_llama(), 3, 1, false), odd_plan(odd_llama(), 2, 4, true),
                          odd_plan(odd_gpt2(), 4, 2, true)};
  for (const char* schedule : {"1f1b", "interleaved", "zb-v", "dualpipe"})
    plans.push_back(pipelined(odd_plan(odd_gpt2(true, 4), 3, 2, true), schedule));
  for (const Plan& plan : plans) {
    const std::vector<Outcome> direct = trained(plan, Collectives::direct, 1);
    for (Collectives collectives :
         {Collectives::ring, Collectives::halving_doubling, Collectives::automatic}) {
      SCOPED_TRACE(describe(plan) + ", " + plan.schedule + ", " + collectives_name(collectives));
      const std::vector<Outcome> other = trained(plan, collectives, 1);
      for (std::size_t rank = 0; rank < direct.size(); ++rank) {
        const Outcome &a = direct[rank], &b = other[rank];
        EXPECT_LE(relative_difference({a.losses[0]}, {b.losses[0]}), verify_bound(plan));
        EXPECT_LE(relative_difference({a.norms[0]}, {b.norms[0]}), verify_bound(plan));
        for (const auto& [name, gradient] : a.gradients)
          EXPECT_LE(relative_difference(gradient, b.gradients.at(name)), verify_bound(plan)) << name;
      }
    }
  }
}

// The textbook: a step of data parallelism sends 2 M elements a rank for M parameters, times (d-1)/d, as a
// ring in 2 (d-1) messages for each all-reduce. Measured on the channels, not by verb.
TEST(CollectivesTraining, ARingSendsTwiceTheGradients) {
  for (int d : {2, 3, 4, 8}) {
    const Plan plan = odd_plan(odd_llama(false, 4), d, 1, false);
    const std::int64_t gradients = num_parameters(plan.model), sums = 2;  // and two numbers: targets and loss
    const auto sent_by_ranks = [&](Collectives collectives, Verb verb) {
      std::vector<VerbTraffic> sent(static_cast<std::size_t>(d));
      on_mesh(
          plan,
          [&](const Rank& rank) {
            Trainer trainer(rank, plan, {}, 1);
            trainer.compute_gradients(0, random_samples(plan));
            sent[static_cast<std::size_t>(rank.index())] = rank.traffic().at(Axis::dp, verb);
            EXPECT_EQ(rank.traffic().bytes(Axis::dp), sent[static_cast<std::size_t>(rank.index())].bytes);
          },
          1, collectives);
      return sent;
    };
    const std::int64_t sums_made = sent_by_ranks(Collectives::direct, Verb::all_reduce)[0].calls;
    std::int64_t all = 0;
    for (const VerbTraffic& rank : sent_by_ranks(Collectives::ring, Verb::send)) {
      EXPECT_EQ(rank.calls, sums_made * 2 * (d - 1));
      EXPECT_NEAR(static_cast<double>(rank.bytes),
                  2.0 * (d - 1) / d * static_cast<double>(gradients + sums) * 8,
                  static_cast<double>(2 * sums_made * 8));  // parts of one sum differ by an element
      all += rank.bytes;
    }
    EXPECT_EQ(all, 2 * (d - 1) * (gradients + sums) * 8);
  }
}

}  // namespace
}  // namespace echelon
