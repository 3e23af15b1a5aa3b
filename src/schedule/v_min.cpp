// V-min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362):
// two half stages per rank in a V; every pass runs one slot after the one that it needs, which gives the
// least memory of any V. Peak floor((P+4)/3) activations, about a third of 1F1B's. Bubble at F = B = W = 1 at
// most 2/3 of 1F1B's: 2P - 5/2 if 3 does not divide P. There is no slack in the pattern: with unequal times
// it waits in every period, so the bubble grows with M.
#include "schedule/schedules.h"
#include "schedule/v_placement.h"

namespace echelon {

Schedule v_min(int ranks, int microbatches) {
  // With P mod 3 = 0 the backward pass starts two slots later, as its slot is taken. That leaves gaps, which
  // squeeze_blocks() closes; otherwise the pattern is already tight.
  const int wait = ranks % 3 == 0 ? 2 : 0;
  std::vector<BlockStarts> blocks;
  for (int r = 0; r < ranks; ++r)
    blocks.push_back({r, 2 * ranks - 1 - r, 2 * ranks + wait + r, 4 * ranks - 1 + wait - r});
  return wait > 0 ? squeeze_blocks("v-min", microbatches, blocks)
                  : repeat_blocks("v-min", microbatches, blocks);
}

}  // namespace echelon
