// A step as it goes on: what each rank holds at which time, and how the next step joins on.
#pragma once

#include <utility>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/timeline.h"

namespace echelon {

// Times, and what is held from there to the next one.
using HeldCurve = std::vector<std::pair<double, double>>;

// What the forward passes of each rank keep for its backward passes: a microbatch of stage s counts
// of_stage[s] from the beginning of its F to the end of its BW or W. `timeline`: of this schedule.
std::vector<HeldCurve> held_over_time(const Schedule& schedule, const Timeline& timeline,
                                      const std::vector<double>& of_stage);

// Two steps, the second with microbatches from num_microbatches on: each rank goes on as soon as it has done
// its own part of the first. For a schedule that flushes: with the optimizer's barrier the second step begins
// where the first has ended on all ranks.
Schedule two_steps(const Schedule& schedule);

}  // namespace echelon
