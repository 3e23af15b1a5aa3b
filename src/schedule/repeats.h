// A schedule found by running its ranks on paper (vocabulary.h) has no formula that tells what it does in
// fewer microbatches; but in a long one all ranks come to do the same again and again.
#pragma once

#include "schedule/schedule.h"

namespace echelon {

// The same with passes left out that repeat: of a stretch in which every rank, some microbatches later, runs
// again what it ran, and holds again what it held, as many are left as show it all. So is every moment of the
// whole, and with it the peak of each rank's memory; and what is left is a schedule of fewer microbatches. As
// it is where nothing repeats.
Schedule without_repeats(const Schedule& schedule);

}  // namespace echelon
