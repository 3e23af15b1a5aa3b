// Simulates a schedule whose ranks have fewer cores than threads. The ranks that compute at a moment share
// the cores evenly, as under an operating system's scheduler.
#pragma once

#include "schedule/simulate.h"

namespace echelon {

struct CoreShare {
  double cores = 1;  // available
  // Cores that one rank of the schedule uses while it computes, together with all ranks that do the same
  // beside it.
  double wanted = 1;
};

// With enough cores this equals simulate(), except that each of two instructions that run together (DualPipe)
// writes at its own end. With fewer, an instruction takes longer the more ranks compute beside it. No core
// idles while a rank could use it: the whole takes at least the ranks' work divided by the cores.
// InvariantError if the schedule cannot finish.
Timeline simulate_on_cores(const Schedule& schedule, const SimulationCosts& costs, const CoreShare& share);

}  // namespace echelon
