// The traces of all ranks of a job, brought together where they are drawn.
#pragma once

#include "comm/rank.h"
#include "schedule/timeline.h"

namespace echelon {

// Marks the steps of training in a rank's trace; nothing where none is recorded.
class StepTrace {
 public:
  explicit StepTrace(const Rank& rank) : recorder_(rank.recorder()) {}
  void begin(std::int64_t step);  // counts from 1
  void end();
  void next();  // ends this one, begins the one after

 private:
  TraceRecorder* recorder_;
  WorkSpan step_;
};

// What this rank recorded, beside what its pipeline ran. `name`: "rank" or "server".
RankTimeline rank_timeline(const Rank& rank, const char* name, std::vector<Span> pipeline);

// By rank of the job, on its rank 0; empty elsewhere. Collective over the job.
std::vector<RankTimeline> gather_timelines(const Rank& rank, const RankTimeline& mine);

}  // namespace echelon
