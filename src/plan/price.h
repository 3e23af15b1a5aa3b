// Prices a given plan with the planner.
#pragma once

#include "plan/step_model.h"
#include "spec/plan.h"

namespace echelon {

// The price of a step of this repository's trainer on `machine`, which has a device for each rank.
// RequestError, naming the flag, if the planner does not price the plan.
Estimate price(const Plan& plan, const Machine& machine, const ExactMemory& exact_memory);

}  // namespace echelon
