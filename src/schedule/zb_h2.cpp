// ZB-H2 (Qi et al. 2023, https://arxiv.org/abs/2401.10241): twice the warm-up of 1F1B, with W delayed so that
// rank r has 2r of them pending: idle (P-1) max(0, B-F, F+B-2W) between a rank's first and last computation
// for M >= 2P-1, which is nothing at F = B = W. Peak 2P-1 activations on every rank.
#include <algorithm>

#include "schedule/schedules.h"

namespace echelon {

Schedule zb_h2(int ranks, int microbatches) {
  Schedule schedule{"zb-h2", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    const int warm_up = std::min(2 * (ranks - r) - 1, microbatches);
    for (int m = 0; m < warm_up; ++m) list.push_back({Op::F, r, m});
    for (int m = 0; m < microbatches; ++m) {
      list.push_back({Op::B, r, m});
      if (m >= 2 * r) list.push_back({Op::W, r, m - 2 * r});
      if (warm_up + m < microbatches) list.push_back({Op::F, r, warm_up + m});
    }
    for (int m = std::max(0, microbatches - 2 * r); m < microbatches; ++m) list.push_back({Op::W, r, m});
  }
  return schedule;
}

}  // namespace echelon
