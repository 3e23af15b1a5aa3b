// ZB-H1 (Qi et al. 2023, https://arxiv.org/abs/2401.10241): 1F1B with the backward split; rank r runs W(j)
// right after B(j+r), so every rank holds P activations. Bubble (P-1) max(F, B, F+B-W) for M >= P: the
// paper's F+B-W unless W is longer than F or B.
#include <algorithm>

#include "schedule/schedules.h"

namespace echelon {

Schedule zb_h1(int ranks, int microbatches) {
  Schedule schedule{"zb-h1", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    const int warm_up = std::min(ranks - r - 1, microbatches);
    for (int m = 0; m < warm_up; ++m) list.push_back({Op::F, r, m});
    for (int m = 0; m < microbatches; ++m) {
      if (warm_up + m < microbatches) list.push_back({Op::F, r, warm_up + m});
      list.push_back({Op::B, r, m});
      if (m >= r) list.push_back({Op::W, r, m - r});
    }
    for (int m = std::max(0, microbatches - r); m < microbatches; ++m) list.push_back({Op::W, r, m});
  }
  return schedule;
}

}  // namespace echelon
