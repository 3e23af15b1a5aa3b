// The cost of a program's limits: the best plan without them, and the best plans of other programs.
#pragma once

#include <string>
#include <vector>

#include "plan/search.h"

namespace echelon {

struct OtherProgram {
  std::string name;  // of a preset; empty: the program itself, with the change in `how`
  std::string how;
  std::string as_of;                // its version
  std::vector<std::string> beyond;  // what of it the requested program does not run
  Estimate plan;
};

// Best plans that are faster than `best` by more than a tie, fastest first: of the program without its limits
// on schedules, ZeRO stages and context parallelism; and of the presets that run the request's precision and
// whatever it pins. This repository's trainer is left out: its numbers are for thread ranks on a CPU.
std::vector<OtherProgram> other_programs(const SearchRequest& request, const Estimate& best);

// Names of the presets that are left out. For a mixture: presets without numbers for the cost of experts, if
// the program has such numbers, because all of them would seem faster. For layers with a state space: presets
// that were not measured with them.
std::vector<std::string> not_compared(const Workload& work);

}  // namespace echelon
