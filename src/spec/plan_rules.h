// The rules of a legal plan. train and verify check them before a run, and the planner for each candidate.
// What concerns the pipeline schedule is in schedule/pipeline_layout.
#pragma once

#include <optional>

#include "spec/plan_refusal.h"

namespace echelon {

// The program that is to run the plan. Some rules hold for every program, as that heads must divide; others
// only for this trainer. Conversely, only this trainer can train a batch that does not divide into equal
// microbatches.
struct Runner {
  bool is_this_trainer = false;
  // Whether several ranks, of tp and of Ulysses, may hold the same key/value head (spec/software.h).
  bool tensor_repeats_heads = false, context_repeats_heads = false;
};
inline constexpr Runner this_trainer{true, true, true};

// The first rule that the plan breaks; empty if it can be run.
// value_refusal() checks each value by itself; RequestError if the mesh as a whole is impossible.
std::optional<Refusal> value_refusal(const Plan& plan, const Runner& runner);
// shape_refusal() checks legal values against each other. A search asks this of each candidate.
std::optional<Refusal> shape_refusal(const Plan& plan, const Runner& runner);

// validate(), except that the caller tries out the remedies that the refusal names.
void judge(const Plan& plan);

}  // namespace echelon
