// When a line about progress comes, and what is in it. No clock runs: the test says what time it is.
#include "base/progress.h"

#include <gtest/gtest.h>

#include <vector>

namespace echelon::progress_test {
namespace {

std::vector<double> shown_until(double end, bool terminal) {
  ProgressPace pace(terminal);
  std::vector<double> times;
  for (double now = 0; now < end; now += 0.125)
    if (pace.is_due(now)) times.push_back(now);
  return times;
}

TEST(Progress, ATerminalIsKeptFreshFromTheFirstSecondOn) {
  EXPECT_EQ(shown_until(1, true), std::vector<double>{});
  EXPECT_EQ(shown_until(1.8, true), (std::vector<double>{1, 1.25, 1.5, 1.75}));
}

TEST(Progress, ElsewhereLinesComeEverLessOften) {
  EXPECT_EQ(shown_until(30, false), std::vector<double>{});
  EXPECT_EQ(shown_until(250, false), (std::vector<double>{30, 60, 120, 240}));
}

TEST(Progress, SaysWhatItKnowsAndFits) {
  EXPECT_EQ(progress_text("verify", "step 2 of 3", 1 / 3.0, 12.2, 79), "verify: step 2 of 3, 33%, 12s");
  EXPECT_EQ(progress_text("simulate", "zb-auto", -1, 61, 79), "simulate: zb-auto, 1m01s");
  EXPECT_EQ(progress_text("train", "", -1, 1, 79), "train: 1s");
  EXPECT_EQ(progress_text("bench", "x", 2, 1, 79), "bench: x, 100%, 1s");
  EXPECT_EQ(progress_text("bench", std::string(200, 'x'), 0.5, 1, 40).size(), 40u);
}

TEST(Progress, NobodyLooking) { report({}, 0.5, "nothing"); }

}  // namespace
}  // namespace echelon::progress_test
