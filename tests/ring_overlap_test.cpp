// What the ring hides: with a delay on every hop as long as the computation with a block, attention takes
// little longer than its computation alone. On clocks that only sleep turns; bench/overlap_bench.cpp measures
// it on the machine's.
#include <gtest/gtest.h>

#include "overlap_runs.h"

namespace echelon::ring_overlap_test {
namespace {

using namespace checks;

TEST(RingOverlap, HopsHideBehindBlocks) {
  constexpr milliseconds block{20};
  for (int cp : {2, 4}) {
    const Time time = time_of_each_thread();
    const double alone = ring_seconds(cp, block, milliseconds(0), time, 1),
                 delayed = ring_seconds(cp, block, block, time, 1);
    // A block forward and two and a half backward, cp of each.
    EXPECT_NEAR(1e3 * alone, 3.5 * 20 * cp, 1e-3);
    // All but the hop home is hidden; blocks off the diagonal have a little less to do than a hop takes.
    EXPECT_NEAR(1e3 * (delayed - alone), 20, 0.2);
  }
}

}  // namespace
}  // namespace echelon::ring_overlap_test
