// One microbatch at a time: all the way down and back before the next starts. Peak 1 activation; bubble (P-1)
// M (F+B+W).
#include "schedule/schedules.h"

namespace echelon {

Schedule naive(int ranks, int microbatches) {
  Schedule schedule{"naive", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    for (int m = 0; m < microbatches; ++m) {
      list.push_back({Op::F, r, m});
      list.push_back({Op::BW, r, m});
    }
  }
  return schedule;
}

}  // namespace echelon
