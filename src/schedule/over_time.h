// A step over time: how much each rank holds when, and how the next step joins on.
#pragma once

#include <utility>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/timeline.h"

namespace echelon {

// Pairs of a time and the amount held from then until the next time.
using HeldCurve = std::vector<std::pair<double, double>>;

// What each rank's forward passes keep for its backward passes. A microbatch of stage s counts of_stage[s]
// from the start of its F to the end of its BW or W. `timeline` is of this schedule.
std::vector<HeldCurve> held_over_time(const Schedule& schedule, const Timeline& timeline,
                                      const std::vector<double>& of_stage);

// Two consecutive steps; the second has microbatches from num_microbatches on. Each rank starts the second as
// soon as it has finished its part of the first. For schedules that flush. (With the optimizer's barrier, the
// second step begins only after the first has ended on all ranks.)
Schedule two_steps(const Schedule& schedule);

}  // namespace echelon
