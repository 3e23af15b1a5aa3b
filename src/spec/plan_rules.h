// What is legal in a plan, whoever asks: train and verify before they run one, the planner of each that it
// looks at. What the pipeline's schedule says of it is in schedule/pipeline_layout.
#pragma once

#include <optional>

#include "spec/plan_refusal.h"

namespace echelon {

// Who runs the plan. No program can cut heads that do not divide; what this trainer cannot do another one
// may. A batch that does not divide into equal microbatches only this one trains.
struct Runner {
  bool is_this_trainer = false;
  // Whether several ranks may have the same key/value head, of tp and of Ulysses (spec/software.h).
  bool tensor_repeats_heads = false, context_repeats_heads = false;
};
inline constexpr Runner this_trainer{true, true, true};

// The first rule that the plan breaks; none where it can be run.
// Of each value by itself; RequestError where the mesh as a whole is none.
std::optional<Refusal> value_refusal(const Plan& plan, const Runner& runner);
// Of values that are legal, taken together. This is what a search asks of each configuration.
std::optional<Refusal> shape_refusal(const Plan& plan, const Runner& runner);

// validate() where whoever calls tries what is called legal.
void judge(const Plan& plan);

}  // namespace echelon
