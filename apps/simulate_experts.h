// simulate --moe.
#pragma once

#include "apps/simulate_experts_flags.h"

namespace echelon {

// Returns the exit status.
int simulate_experts(SimulateFlags& shared, const ExpertsFlags& flags);

}  // namespace echelon
