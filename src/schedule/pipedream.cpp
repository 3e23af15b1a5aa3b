// PipeDream (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377): 1F1B without a flush. The weights are
// updated after each microbatch's backward pass. A forward pass uses the newest weights of its rank; its
// backward pass uses the same ones (weight stashing). Peak P-r activations and P-r weight versions; a
// gradient is P-1-r steps late; no bubble in the steady state.
#include <algorithm>

#include "schedule/schedules.h"

namespace echelon {

Schedule pipedream(int ranks, int microbatches) {
  Schedule schedule{"pipedream", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    const int warm_up = std::min(ranks - r - 1, microbatches);
    // The weight version that F(m) finds: it runs after the steps of microbatches 0 .. m-1-warm_up.
    const auto run = [&](Op op, int m) { list.push_back({op, r, m, std::max(0, m - warm_up)}); };
    for (int m = 0; m < warm_up; ++m) run(Op::F, m);
    for (int m = 0; m < microbatches; ++m) {
      if (warm_up + m < microbatches) run(Op::F, warm_up + m);
      run(Op::BW, m);
      list.push_back({Op::step, r, m, m});
    }
  }
  return schedule;
}

}  // namespace echelon
