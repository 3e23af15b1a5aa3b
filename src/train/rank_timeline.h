// Collects the traces of all ranks of a job for drawing.
#pragma once

#include "comm/rank.h"
#include "schedule/timeline.h"

namespace echelon {

// Marks training steps in a rank's trace; does nothing without a recorder.
class StepTrace {
 public:
  explicit StepTrace(const Rank& rank) : recorder_(rank.recorder()) {}
  void begin(std::int64_t step);  // counts from 1
  void end();
  void next();  // ends this step and begins the next

 private:
  TraceRecorder* recorder_;
  WorkSpan step_;
};

// What this rank recorded, together with what its pipeline ran. `name`: "rank" or "server".
RankTimeline rank_timeline(const Rank& rank, const char* name, std::vector<Span> pipeline);

// By rank of the job, on its rank 0; empty elsewhere. Collective over the job.
std::vector<RankTimeline> gather_timelines(const Rank& rank, const RankTimeline& mine);

}  // namespace echelon
