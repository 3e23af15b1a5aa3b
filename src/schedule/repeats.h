// In a long step a rank comes to do the same again and again.
#pragma once

#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// What a rank of a lowered schedule runs, with passes left out that repeat: of a stretch in which it runs,
// some microbatches later, what it ran before, and then holds as much, three rounds are left. Every moment of
// the whole is in them, and with it the peak of the rank's memory. What is left counts its microbatches from
// 0. As it is where nothing repeats.
std::vector<Instruction> without_repeats(const Schedule& lowered, int rank);

}  // namespace echelon
