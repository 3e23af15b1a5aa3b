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
// shape_refusal() checks legal values against each other.
std::optional<Refusal> shape_refusal(const Plan& plan, const Runner& runner);

// The same for a search's many candidates. Most have the axes of the candidate before them, and if these
// cannot be, the reason is written once.
class ShapeRefusals {
 public:
  explicit ShapeRefusals(const Runner& runner) : runner_(runner) {}
  // Of plans that differ in what a search varies (PlanField::is_searched()). Valid until the next call.
  const std::optional<Refusal>& of(const Plan& plan);

 private:
  struct Axes {
    Mesh mesh;
    std::string schedule;
    bool operator==(const Axes&) const = default;
  };
  Runner runner_;
  std::optional<Axes> axes_;  // of the plan before
  std::optional<Refusal> of_axes_, of_rest_;
};

// validate(), except that the caller tries out the remedies that the refusal names.
void judge(const Plan& plan);

}  // namespace echelon
