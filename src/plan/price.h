// A plan as it is, priced by the planner.
#pragma once

#include "plan/step_model.h"
#include "spec/plan.h"

namespace echelon {

// What a step of this repository's trainer takes on `machine`, which has a device for each rank. RequestError
// for what the planner does not price, naming the flag.
Estimate price(const Plan& plan, const Machine& machine, const ExactMemory& exact_memory);

}  // namespace echelon
