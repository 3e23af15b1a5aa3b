// Runs a schedule on paper where its ranks have fewer cores than threads: those that compute at a moment
// share the cores evenly, as an operating system's scheduler does.
#pragma once

#include "schedule/simulate.h"

namespace echelon {

struct CoreShare {
  double cores = 1;   // that there are
  double wanted = 1;  // by one rank of the schedule while it computes, and by all that do the same beside it
};

// With cores for all it is what simulate() says, but that of two that run together (DualPipe) each part
// writes at its own end. With fewer, an instruction takes longer the more ranks compute beside it; no time is
// lost while any rank has something to do: in all it takes no less than the ranks' work over the cores.
// InvariantError where the schedule cannot finish.
Timeline simulate_on_cores(const Schedule& schedule, const SimulationCosts& costs, const CoreShare& share);

}  // namespace echelon
