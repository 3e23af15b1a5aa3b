// The published schedules, one file each. P ranks, M microbatches; order, peak memory and bubble of each in
// docs/schedules.md.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace echelon {

Schedule naive(int ranks, int microbatches);
Schedule gpipe(int ranks, int microbatches);
Schedule one_f_one_b(int ranks, int microbatches);
// `group`: microbatches that go through one chunk before the next chunk's turn; 0: the best one for this M.
Schedule interleaved(int ranks, int microbatches, int chunks, int group = 0);
Schedule pipedream(int ranks, int microbatches);
// `step_microbatches`: microbatches of one optimizer step; `microbatches` is a multiple of it.
Schedule two_bw(int ranks, int microbatches, int step_microbatches);
Schedule zb_h1(int ranks, int microbatches);
Schedule zb_h2(int ranks, int microbatches);
Schedule zb_v(int ranks, int microbatches);

}  // namespace echelon
