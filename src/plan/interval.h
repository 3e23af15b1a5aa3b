// The interval of a step's predicted time: as wide as the program's predictions were off where it was
// measured, and wider elsewhere.
#pragma once

#include <cstdint>
#include <string>

#include "plan/workload.h"

namespace echelon {

// Factors of the predicted time for a program of which nothing was measured: predicted with the other
// programs' numbers, 80% of the steps of any program lay between them.
inline constexpr double unknown_high = 1.45;
// The same for mixtures of experts and for layers with a state space, which were measured with one program
// only.
inline constexpr double unknown_expert_high = 1.72;
inline constexpr double unknown_scan_high = 1.85;

enum class Distance {
  measured,  // like what was measured: its machine and precision, and within twice its range
  far,
  unknown,  // no run was measured
};

struct Interval {
  Distance distance = Distance::unknown;
  double low = 1 / unknown_high, high = unknown_high;  // 80% lie between these factors
  std::string why;  // "of dense models on several nodes", "not on h100 in bf16"
};
// `parameters`: of the plan's model; passed in because counting hundreds of experts takes long.
Interval interval_of(const Workload& work, const Plan& plan, std::int64_t parameters);

}  // namespace echelon
