// Caches schedules, and facts that follow from their order alone, by shape. The planner asks for the same few
// shapes hundreds of thousands of times, from one search to the next.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/simulate.h"

namespace echelon {

// A stage that a rank runs in a step.
struct StageUse {
  int stage = 0;
  double share = 1;  // of the microbatches: 1/2 in DualPipe
};

struct ScheduleFacts {
  int num_stages = 1;
  double stage_fraction = 1;
  int parameter_copies = 1;
  bool splits_backward = false;                // B and W are separate
  bool overlaps = false;                       // F and B run together
  std::vector<std::vector<StageUse>> uses;     // of each rank
  std::vector<double> peak;                    // of each rank, in activations of a full stage
  std::vector<std::vector<HeldByStage>> held;  // of each rank, at the moments when it may hold most
  std::vector<double> sends;                   // of each rank: messages to others, per microbatch
  std::string problem;                         // if there is no such schedule: why
  std::string vocabulary_problem;              // the same if the output layer is cut over its ranks
};

class ScheduleShelf {
 public:
  // Read off a schedule of steady_microbatches().
  const ScheduleFacts& facts(const std::string& name, int ranks, int microbatches, int chunks);
  // The reference is valid until several other schedules were requested.
  const Schedule& schedule(const std::string& name, int ranks, int microbatches, int chunks);

 private:
  using Key = std::tuple<std::string, int, int, int>;
  std::map<Key, ScheduleFacts> facts_;
  std::deque<std::pair<Key, Schedule>> schedules_;  // the most recent ones, newest first
};

ScheduleFacts facts_of(const Schedule& schedule);

}  // namespace echelon
