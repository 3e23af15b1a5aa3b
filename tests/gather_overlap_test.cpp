// What gathering parameters ahead of their use hides: with a delay planted on every gather, the time of a
// step beside that of its computation alone and of its gathers alone, on clocks that only sleep turns.
// bench/overlap_bench.cpp measures the same on the machine's.
#include <gtest/gtest.h>

#include "overlap_runs.h"

namespace echelon::gather_overlap_test {
namespace {

using namespace checks;

OverlapTimes sleeping(int delay, int ahead) {
  SleepingStep step;
  step.delay = milliseconds(delay);
  return sleeping_gathers(step, ahead, time_of_each_thread(), 1);
}

// 8 layers of 3 ms forward and 6 ms backward, the output layer 3 ms; the embedding takes none. Gathers follow
// one another: what is always there, the embedding, 9 layers, and 8 of them again (of those that are still
// there none).
TEST(GatherOverlap, OfSleepingLayers) {
  constexpr double compute = 8 * 9 + 3;
  struct Expected {
    int delay, ahead;
    double together;
  };
  for (const Expected& e : {
           Expected{2, 1, compute + 3 * 2},                // all but the first three are hidden
           Expected{4, 1, 3 * 4 + 9 * (4 - 3) + compute},  // and of those behind a forward pass 3 ms
           Expected{8, 1, 19 * 8 + 6},                     // all computation but the last layer's is hidden
           Expected{4, 3, 11 * 4 + 3 + 8 * 6},  // forward the link is busy, backward it keeps ahead
       }) {
    SCOPED_TRACE(fmt::format("{} ms, {} ahead", e.delay, e.ahead));
    const OverlapTimes t = sleeping(e.delay, e.ahead);
    EXPECT_NEAR(1e3 * t.compute, compute, 1e-6);
    EXPECT_NEAR(1e3 * t.communication, 1e3 * t.planted, 1e-6);
    EXPECT_NEAR(1e3 * t.together, e.together, 1e-6);
    EXPECT_GE(t.hidden(), 0.6);
  }
}

TEST(GatherOverlap, NoneWithoutGatheringAhead) {
  const OverlapTimes t = sleeping(4, 0);
  EXPECT_NEAR(t.hidden(), 0, 1e-9);
  EXPECT_NEAR(t.waited, t.planted, 1e-9);
}

// In a training step matrix products take a millisecond each, and the gathers four times as long.
TEST(GatherOverlap, OfATrainingStep) {
  const OverlapTimes t = training_gathers(1, milliseconds(1), time_of_each_thread(), 1);
  EXPECT_GE(t.hidden(), 0.6);
  EXPECT_NEAR(t.together, t.compute + t.waited, 1e-9);
}

TEST(GatherOverlap, WithoutGatheringAheadATrainingStepWaitsForAllOfThem) {
  const OverlapTimes t = training_gathers(0, milliseconds(1), time_of_each_thread(), 1);
  EXPECT_NEAR(t.waited, t.planted, 1e-9);
  EXPECT_NEAR(t.together, t.compute + t.planted, 1e-9);
  EXPECT_NEAR(t.hidden(), 0, 1e-9);
}

}  // namespace
}  // namespace echelon::gather_overlap_test
