// What DualPipe's pairs hide: passes sleep as long as they would compute, and halfway something travels for
// as long. Where the two of a pair change places, it travels while the other computes. On clocks that only
// sleep turns; bench/overlap_bench.cpp measures it on the machine's.
#include <gtest/gtest.h>

#include "overlap_runs.h"

namespace echelon::pair_overlap_test {
namespace {

using namespace checks;

TEST(PairOverlap, OnePassComputesWhileTheOtherTravels) {
  constexpr int ranks = 2, microbatches = 12;
  constexpr milliseconds travel{10};
  SimulationCosts costs;
  costs.stages = {{0.020, 0.020, 0.010}};
  const StepPrograms programs(make_schedule("dualpipe", ranks, microbatches, 0));
  int pairs = 0;
  for (const Instruction& i : programs.schedule().ranks[0]) pairs += i.overlaps_next;
  ASSERT_GT(pairs, microbatches / 2);
  const Time time = time_of_each_thread();
  const SleepingRun apart = run_asleep(programs, ranks, costs, travel, false, time),
                    together = run_asleep(programs, ranks, costs, travel, true, time);
  const double hidden = (apart.seconds - together.seconds) / (2 * pairs * seconds_of(travel));
  EXPECT_DOUBLE_EQ(hidden, 1);
  // A pair counts once.
  EXPECT_NEAR(apart.timeline.busy(0) - together.timeline.busy(0), 2 * pairs * seconds_of(travel), 1e-9);
}

}  // namespace
}  // namespace echelon::pair_overlap_test
