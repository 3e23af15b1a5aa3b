// V-half (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362):
// two half stages per rank in a V; passes are two slots apart on the way in and one on the way back. Peak
// floor(P/2) + 1 activations, about half of 1F1B's; bubble at most half of 1F1B's at F = B = W.
#include "schedule/schedules.h"
#include "schedule/v_placement.h"

namespace echelon {

Schedule v_half(int ranks, int microbatches) {
  // With even P the backward pass starts three slots later, as its slot is taken.
  const int wait = ranks % 2 == 0 ? 3 : 0;
  std::vector<BlockStarts> blocks;
  for (int r = 0; r < ranks; ++r)
    blocks.push_back({2 * r, 3 * ranks - 2 - r, 3 * ranks - 1 + wait + 2 * r, 6 * ranks - 2 + wait - r});
  return squeeze_blocks("v-half", microbatches, blocks);
}

}  // namespace echelon
