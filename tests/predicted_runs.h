// A step's traffic and memory, predicted and measured, subtracted.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "case_choice.h"
#include "mesh_runs.h"
#include "plan/assumptions.h"
#include "train/dry_run.h"

namespace echelon::checks {

struct Measured {
  Traffic traffic;
  Memory peak;
  DecidedByData decided;
};

// In the second step, by rank.
inline std::vector<Measured> measure(const Plan& plan) {
  std::vector<Measured> measured(static_cast<std::size_t>(plan.mesh.num_ranks()));
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    Traffic before;
    for (std::int64_t step : {0, 1}) {
      before = rank.traffic();
      rank.arena().reset_peak();
      trainer.compute_gradients(step, random_samples(plan));
      trainer.apply_gradients(step);
    }
    measured[static_cast<std::size_t>(rank.index())] = {rank.traffic() - before, rank.arena().peak(),
                                                        trainer.take_decided()};
  });
  return measured;
}

inline void expect_same(const Traffic& predicted, const Traffic& measured) {
  for (Axis axis : traffic_axes)
    for (Verb verb : all_verbs) {
      EXPECT_EQ(predicted.at(axis, verb).calls, measured.at(axis, verb).calls)
          << axis_name(axis) << " " << verb_name(verb);
      EXPECT_EQ(predicted.at(axis, verb).bytes, measured.at(axis, verb).bytes)
          << axis_name(axis) << " " << verb_name(verb);
    }
}

inline void expect_same(const Memory& predicted, const Memory& measured) {
  for (MemoryCategory c : all_memory_categories)
    EXPECT_EQ(predicted[c], measured[c]) << memory_category_name(c);
}

// Whatever a plan assumes, its traffic follows from what the data decided.
inline void expect_as_measured(const Plan& plan) {
  const std::vector<Measured> measured = measure(plan);
  const PipelineLayout pipeline(plan);
  for (int rank = 0; rank < plan.mesh.num_ranks(); ++rank) {
    const Coordinates at = plan.mesh.coordinates(rank);
    SCOPED_TRACE(fmt::format("{}, batch {} of {}, rank {}", describe(plan), plan.micro_batch,
                             plan.global_batch, rank));
    const Measured& m = measured[static_cast<std::size_t>(rank)];
    expect_same(predict_traffic(plan, pipeline, at, many_updates, m.decided), m.traffic);
    if (traffic_assumptions(plan).empty()) expect_same(predict_traffic(plan, pipeline, at), m.traffic);
    if (memory_assumptions(plan).empty()) expect_same(predict_memory(plan, pipeline, at), m.peak);
  }
}
// The same as one of a loop's cases: whoever calls it asks is_taken() no more.
inline void expect_predicted(const Plan& plan) {
  if (is_taken()) expect_as_measured(plan);
}

}  // namespace echelon::checks
