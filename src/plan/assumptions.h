// What predictions assume about a run and only its data decides. If a plan has such assumptions, measured
// values may differ from predicted ones, and the report says so. All other predictions of memory and traffic
// equal the measurement.
#pragma once

#include <vector>

#include "spec/plan.h"

namespace echelon {

enum class Assumption {
  even_expert_load,   // every expert of a group of ranks gets equally many copies of tokens
  no_step_taken_back  // without the optimizer's barrier: every guess is right, so no pass is repeated
};
const char* assumption_name(Assumption assumption);

std::vector<Assumption> memory_assumptions(const Plan& plan);
std::vector<Assumption> traffic_assumptions(const Plan& plan);

}  // namespace echelon
