// The eight steps that DualPipe and DualPipeV share.
#pragma once

#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// One of the two streams of microbatches that cross a rank.
struct DualPipePhase {
  int stage;             // the stage that the rank runs for them
  int first_microbatch;  // the rest follow
};

// The instructions of one rank. The stream `near` enters the pipeline at the end that is `distance` ranks
// away; `half` ranks lie between that end and where the two streams meet. Each stream has `microbatches` >= 2
// half.
std::vector<Instruction> dualpipe_steps(DualPipePhase near, DualPipePhase far, int distance, int half,
                                        int microbatches);

}  // namespace echelon
