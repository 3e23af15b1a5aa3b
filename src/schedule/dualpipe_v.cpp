// DualPipeV (DeepSeek-AI, https://github.com/deepseek-ai/DualPipe; "cut in half" by Qi et al.): DualPipe
// folded at its middle. Two half stages a rank in a V (rank r holds stages r and 2P-1-r), all microbatches
// enter at rank 0, and parameters are held once. M >= 2P. Peak P + 1/2 activations; bubble (P-1)(F&B + B+W -
// 3W)/2 where F = B, W <= B and F&B = F+B+W, in times of a full stage.
#include "schedule/dualpipe_steps.h"
#include "schedule/schedules.h"

namespace echelon {

Schedule dualpipe_v(int ranks, int microbatches) {
  if (microbatches < 2 * ranks)
    refuse_microbatches(microbatches, "dualpipev needs at least 2P = {}", 2 * ranks);
  Schedule schedule{"dualpipev", 2 * ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r)
    schedule.ranks.push_back(dualpipe_steps({r, 0}, {2 * ranks - 1 - r, 0}, r, ranks, microbatches));
  return schedule;
}

}  // namespace echelon
