// What predictions take for granted and only the data of a run decide: where a plan has such, what is
// measured may differ, and says so. All other predictions of memory and traffic are equal to it.
#pragma once

#include <vector>

#include "spec/plan.h"

namespace echelon {

enum class Assumption {
  even_expert_load,   // every expert of a group of ranks gets as many copies of tokens as any other
  no_step_taken_back  // without the optimizer's barrier: every guess is right, so no pass is run again
};
const char* assumption_name(Assumption assumption);

std::vector<Assumption> memory_assumptions(const Plan& plan);
std::vector<Assumption> traffic_assumptions(const Plan& plan);

}  // namespace echelon
