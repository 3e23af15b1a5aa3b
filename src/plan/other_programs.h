// What the program's limits cost: the best plan without them, and those of other programs.
#pragma once

#include <string>
#include <vector>

#include "plan/search.h"

namespace echelon {

struct OtherProgram {
  std::string name;  // of a preset; empty: the program itself, as `how` says
  std::string how;
  std::string as_of;                // its version
  std::vector<std::string> beyond;  // what the program that was asked for does not run of it
  Estimate plan;
};

// Best plans that take less than `best` by more than a tie, the fastest first: of the program without limits
// of schedules, stages of ZeRO and context parallelism; of the presets that run the request's precision and
// whatever it pins. This repository's trainer is not among them: its numbers are of thread ranks on a CPU.
std::vector<OtherProgram> other_programs(const SearchRequest& request, const Estimate& best);

// Presets that are left out of it, by name. For a mixture: their numbers do not say what experts cost, where
// the program's own do, so all of them would seem faster. For layers with a state space all are: none was
// measured with them.
std::vector<std::string> not_compared(const Workload& work);

}  // namespace echelon
