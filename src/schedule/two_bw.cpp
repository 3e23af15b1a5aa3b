// PipeDream-2BW (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503): 1F1B that continues across steps.
// The gradients of a step's microbatches are accumulated and applied once, and the microbatches of step t use
// the weights of step t-1: W(t+1) = W(t) - lr grad f(W(t-1)), a delay of exactly 1 on every rank. Peak P-r
// activations and two weight versions; no bubble in the steady state. A step needs P microbatches, so that a
// version exists before the first forward pass that uses it.
#include <algorithm>

#include "base/error.h"
#include "schedule/schedules.h"

namespace echelon {

Schedule two_bw(int ranks, int microbatches, int step_microbatches) {
  if (step_microbatches < ranks)
    refuse_microbatches(step_microbatches, "2bw needs at least P = {} a step", ranks);
  check(microbatches % step_microbatches == 0, "2bw: whole steps");
  Schedule schedule{"2bw", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    const int warm_up = std::min(ranks - r - 1, microbatches);
    const auto run = [&](Op op, int m) {
      list.push_back({op, r, m, std::max(0, m / step_microbatches - 1)});
    };
    for (int m = 0; m < warm_up; ++m) run(Op::F, m);
    for (int m = 0; m < microbatches; ++m) {
      if (warm_up + m < microbatches) run(Op::F, warm_up + m);
      run(Op::BW, m);
      if ((m + 1) % step_microbatches == 0) list.push_back({Op::step, r, m, m / step_microbatches});
    }
  }
  return schedule;
}

}  // namespace echelon
