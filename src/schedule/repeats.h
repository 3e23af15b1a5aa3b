// Shortens long steps, in which a rank repeats itself.
#pragma once

#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// A rank's instructions without repeated passes. Where a stretch repeats earlier passes for later
// microbatches and ends holding as much, three rounds of it remain. These contain every state of the whole,
// and so the rank's peak memory. The remaining microbatches are renumbered from 0. Unchanged if nothing
// repeats.
std::vector<Instruction> without_repeats(const Schedule& lowered, int rank);

}  // namespace echelon
