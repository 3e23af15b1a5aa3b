// V-min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362):
// two half stages a rank in a V, every pass one slot after the one it needs: the least memory that a V can
// have. Peak floor((P+4)/3) activations, about a third of 1F1B's. Bubble at F = B = W = 1 at most 2/3 of
// 1F1B's: 2P - 5/2 where 3 does not divide P. There is no slack in it: with unequal times it waits in every
// period, so the bubble grows with M.
#include "schedule/schedules.h"
#include "schedule/v_placement.h"

namespace echelon {

Schedule v_min(int ranks, int microbatches) {
  // With P mod 3 = 0 the backward pass starts two slots later: its slot would be taken. That leaves gaps,
  // which squeezing closes; without them the pattern is as tight as it can be.
  const int wait = ranks % 3 == 0 ? 2 : 0;
  std::vector<BlockStarts> blocks;
  for (int r = 0; r < ranks; ++r)
    blocks.push_back({r, 2 * ranks - 1 - r, 2 * ranks + wait + r, 4 * ranks - 1 + wait - r});
  return wait > 0 ? squeeze_blocks("v-min", microbatches, blocks)
                  : repeat_blocks("v-min", microbatches, blocks);
}

}  // namespace echelon
