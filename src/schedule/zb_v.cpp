// ZB-V (Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 6): two half stages a rank in a V: rank r
// holds stages r and 2P-1-r, so that a microbatch turns round on the last rank and its loss is computed on
// the first. Peak P activations on every rank; no idle time between a rank's first forward and its last at F
// = B = W and M >= 2P-1.
#include <algorithm>

#include "schedule/schedules.h"

namespace echelon {

Schedule zb_v(int ranks, int microbatches) {
  Schedule schedule{"zb-v", 2 * ranks, microbatches, {}};
  // With fewer microbatches than the pattern needs, the pattern is run without those that do not exist: what
  // is left keeps its order, so it cannot dead-lock.
  const int whole = std::max(microbatches, 2 * ranks - 1);
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    int next[2][3] = {};  // microbatch of the next F, B, W of each chunk
    const auto run = [&](Op op, int chunk) {
      int& m = next[chunk][op == Op::F ? 0 : op == Op::B ? 1 : 2];
      if (m < microbatches) list.push_back({op, chunk == 0 ? r : 2 * ranks - 1 - r, m});
      ++m;
    };
    for (int i = 0; i < 2 * (ranks - r) - 1; ++i) run(Op::F, 0);
    for (int i = 0; i < r; ++i) {
      run(Op::F, 1);
      run(Op::F, 0);
    }
    for (int i = 0; i < ranks - r; ++i) {
      run(Op::F, 1);
      run(Op::B, 1);
      run(Op::W, 1);
    }
    while (next[1][0] < next[0][0] || next[0][0] < whole) {
      if (next[0][0] < whole) run(Op::F, 0);
      run(Op::B, 0);
      run(Op::W, 0);
      run(Op::F, 1);
      run(Op::B, 1);
      run(Op::W, 1);
    }
    for (int i = 0; i < r; ++i) {
      run(Op::B, 0);
      run(Op::B, 1);
    }
    for (int i = 0; i < ranks - r; ++i) {
      run(Op::B, 0);
      run(Op::W, 0);
    }
    while (next[1][2] < whole) run(Op::W, 1);
    while (next[0][2] < whole) run(Op::W, 0);
  }
  return schedule;
}

}  // namespace echelon
