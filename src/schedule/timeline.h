// What ran when. One type for what simulate() predicts and what a run measures.
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
  std::vector<std::vector<Span>> ranks;  // by rank, in the order of execution

  double makespan() const;         // first begin to last end, over all ranks
  double busy(int rank) const;     // time in computations (is_compute()); an overlapped pair counts once
  double work() const;             // mean of busy() over ranks
  double bubble_fraction() const;  // idle time divided by ranks x makespan
  // Idle time between a rank's first and last computation; the largest over ranks. Zero-bubble schedules make
  // it 0.
  double local_bubble() const;
};

// Everything that one rank did in the last steps of a run.
struct RankTimeline {
  std::string name;            // "rank 3", "server 0"
  std::string place;           // "pp 0, dp 1, cp 0, tp 1"; empty without a mesh
  std::vector<Span> pipeline;  // in seconds since the run began
  Trace trace;
};

// The last `steps` steps of a stream: on each rank, what follows the optimizer step before them.
Timeline last_steps(const Timeline& timeline, int step_microbatches, int steps);

}  // namespace echelon
