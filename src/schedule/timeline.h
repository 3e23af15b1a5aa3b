// When what ran: predicted by simulate(), measured by a run, one type for both.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "spec/trace.h"

namespace echelon {

struct Span {
  Instruction instruction;
  double begin = 0, end = 0;  // in the unit of the times given, or in seconds when measured
};

struct Timeline {
  std::vector<std::vector<Span>> ranks;  // in the order in which each rank ran them

  double makespan() const;         // first begin to last end over all ranks
  double busy(int rank) const;     // time in computations (is_compute()); that of an overlapped pair once
  double work() const;             // the mean of these over ranks
  double bubble_fraction() const;  // idle time over ranks x makespan
  // Idle time between a rank's first and last computation: the largest over ranks. What zero-bubble schedules
  // bring to 0.
  double local_bubble() const;
};

// All that one rank did in the last steps of a run.
struct RankTimeline {
  std::string name;            // "rank 3", "server 0"
  std::string place;           // "pp 0, dp 1, cp 0, tp 1"; empty where there is no mesh
  std::vector<Span> pipeline;  // in seconds since the run began
  Trace trace;
};

// The last `steps` steps of a stream: on each rank what comes behind the optimizer step that ends the step
// before them.
Timeline last_steps(const Timeline& timeline, int step_microbatches, int steps);

}  // namespace echelon
