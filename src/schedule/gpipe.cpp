// GPipe (Huang et al. 2018, https://arxiv.org/abs/1811.06965): all forwards, then all backwards. Peak M
// activations; bubble (P-1)(F+B+W).
#include "schedule/schedules.h"

namespace echelon {

Schedule gpipe(int ranks, int microbatches) {
  Schedule schedule{"gpipe", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    for (int m = 0; m < microbatches; ++m) list.push_back({Op::F, r, m});
    for (int m = 0; m < microbatches; ++m) list.push_back({Op::BW, r, m});
  }
  return schedule;
}

}  // namespace echelon
