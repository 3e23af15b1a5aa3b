// 1F1B with a flush (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473): after P-1-r warm-up forwards
// each forward is followed by a backward. Peak min(P-r, M) activations; bubble (P-1)(F+B+W), as GPipe.
#include <algorithm>

#include "schedule/schedules.h"

namespace echelon {

Schedule one_f_one_b(int ranks, int microbatches) {
  Schedule schedule{"1f1b", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    const int warm_up = std::min(ranks - r - 1, microbatches);
    for (int m = 0; m < warm_up; ++m) list.push_back({Op::F, r, m});
    for (int m = 0; m < microbatches; ++m) {
      if (warm_up + m < microbatches) list.push_back({Op::F, r, warm_up + m});
      list.push_back({Op::BW, r, m});
    }
  }
  return schedule;
}

}  // namespace echelon
