// Between which times a step lies: as far as the program's predictions were off where it was measured, wider
// where it was not.
#pragma once

#include <cstdint>
#include <string>

#include "plan/workload.h"

namespace echelon {

// Factors of the predicted time of a program of which nothing was measured: between them lay 80% of the steps
// of any program that was priced with the others' numbers.
inline constexpr double unknown_high = 1.45;
// The same of mixtures of experts and of layers with a state space, which one program alone was measured
// with.
inline constexpr double unknown_expert_high = 1.72;
inline constexpr double unknown_scan_high = 1.85;

enum class Distance {
  measured,  // like what was measured: its machine and precision, and at most twice outside of its range
  far,
  unknown,  // nothing was
};

struct Interval {
  Distance distance = Distance::unknown;
  double low = 1 / unknown_high, high = unknown_high;  // 80% lie between these factors
  std::string why;  // "of dense models on several nodes", "not on h100 in bf16"
};
// `parameters`: of the plan's model; with hundreds of experts it takes long to count them.
Interval interval_of(const Workload& work, const Plan& plan, std::int64_t parameters);

}  // namespace echelon
