// DualPipe (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437): half of the microbatches enter at each end.
// Stage s is on rank s for those that enter at rank 0 (0 .. M/2-1) and on rank P-1-s for the others, so
// parameters are held twice. A forward pass of one direction runs together with a backward pass of the other,
// each hiding the other's communication. P and M are even, M >= 2P. Peak P+1 activations; bubble (P/2-1)(F&B
// + B+W - 3W) where F = B, W <= B and F&B = F+B+W.
#include <algorithm>

#include "base/error.h"
#include "schedule/dualpipe_steps.h"
#include "schedule/schedules.h"

namespace echelon {

Schedule dualpipe(int ranks, int microbatches) {
  if (ranks < 2 || ranks % 2 != 0)
    refuse("--pp {}: dualpipe needs an even number, the next is {}", ranks, std::max(2, ranks + 1));
  if (microbatches < 2 * ranks)
    refuse_microbatches(microbatches, "dualpipe needs at least 2P = {}", 2 * ranks);
  if (microbatches % 2 != 0)
    refuse_microbatches(microbatches, "dualpipe needs an even number, the next is {}", microbatches + 1);
  Schedule schedule{"dualpipe", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    const DualPipePhase down{r, 0}, up{ranks - 1 - r, microbatches / 2};
    const bool first_half = r < ranks / 2;
    schedule.ranks.push_back(dualpipe_steps(first_half ? down : up, first_half ? up : down,
                                            std::min(r, ranks - 1 - r), ranks / 2, microbatches / 2));
  }
  return schedule;
}

}  // namespace echelon
