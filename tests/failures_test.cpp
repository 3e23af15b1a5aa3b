// A rank that dies, hangs, throws or disagrees ends the job on every rank with a report that names it: for
// thread ranks and, where the build has MPI, for processes. What the report says does not depend on how fast
// the machine is: nothing is late before that rank has gone wrong (failing_job.cpp). When it comes is
// decided by control_protocol_test.cpp and thread_failures_test.cpp, on a clock that they turn.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "run_command.h"
#include "temporary_directory.h"

namespace {

using echelon::checks::CommandResult;

constexpr int timeout_ms = 500;
constexpr int ranks = 4;

class Failures : public testing::TestWithParam<const char*> {
 protected:
  bool processes() const { return std::string(GetParam()) == "mpi"; }
  // mpirun ends the others a second after the first has died, unless it is told not to.
  CommandResult fail(int rank, const char* how, const char* mpirun = "mpirun") const {
    const echelon::checks::TemporaryDirectory directory;
    const std::string job = fmt::format("{} {} {} {} {} {} {}", FAILING_JOB, GetParam(), ranks, rank, how,
                                        timeout_ms, (directory / "mark"));
    return echelon::checks::run_command(
        processes() ? fmt::format("timeout 300 {} -n {} --oversubscribe {}", mpirun, ranks, job)
                    : "timeout 300 " + job);
  }
  void expect_words(const CommandResult& r, const std::vector<std::string>& words) const {
    for (const std::string& word : words)
      EXPECT_NE(r.output.find(word), std::string::npos) << word << " is not in: " << r.output;
    // Once, whoever says it.
    EXPECT_EQ(r.output.find("report: "), r.output.rfind("report: ")) << r.output;
  }
  // The report says all of this, and how each rank stood.
  void expect_report(const CommandResult& r, const std::vector<std::string>& words) const {
    std::vector<std::string> all = words;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(fmt::format("\n  rank {}", rank));
    all.push_back("waits in dp collective 11 (all_reduce of 1000 f32)");
    all.push_back("at step 10");
    all.push_back("last finished ");
    all.push_back("end of report");
    expect_words(r, all);
  }
};

TEST_P(Failures, NoneIsNoFailure) {
  const CommandResult r = fail(0, "none");
  EXPECT_EQ(r.status, 0) << r.output;
  EXPECT_EQ(r.output.find("report"), std::string::npos) << r.output;
}

TEST_P(Failures, ARankThatThrowsIsNamedWithItsReason) {
  for (int rank : {0, 3}) {
    const CommandResult r = fail(rank, "throw");
    EXPECT_EQ(r.status, 3);
    expect_report(r, {fmt::format("rank {} failed: the disk of rank", rank),
                      fmt::format("rank {}, at fault", rank), "record of rank 1: "});
  }
}

// Each by itself: one speaks, all causes are said, and each is in the record of its rank.
TEST_P(Failures, RanksThatFailTogetherAreAllNamed) {
  const CommandResult r = fail(0, "together");
  EXPECT_EQ(r.status, 3);
  std::vector<std::string> words{"report: rank ", "end of report"};
  int too = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    words.push_back(fmt::format("failed\":\"the disk of rank {} is full\"}}", rank));
    words.push_back(fmt::format("rank {} failed", rank));
    if (r.output.find(fmt::format("\n  rank {0} failed too: the disk of rank {0} is full", rank)) !=
        std::string::npos)
      ++too;
  }
  EXPECT_EQ(too, ranks - 1) << r.output;
  expect_words(r, words);
}

// Before the ranks run: its cause was lost once, and the others waited for it until their time was up.
TEST_P(Failures, AProcessThatFailsAloneBeforeTheRunIsNamed) {
  if (!processes()) GTEST_SKIP() << "thread ranks begin with the run";
  for (int rank : {0, 2}) {
    const CommandResult r = fail(rank, "alone");
    EXPECT_EQ(r.status, 3);
    expect_words(r, {fmt::format("report: rank {0} failed: the disk of rank {0} is full", rank),
                     fmt::format("rank {}, at fault", rank)});
  }
}

TEST_P(Failures, RanksThatDisagreeAreBothNamed) {
  CommandResult r = fail(2, "disagree");
  EXPECT_EQ(r.status, 3);
  expect_words(r, {"dp collective 11", "all_reduce of 1000 f32", "all_reduce of 7 f32", "rank 0 called",
                   "rank 2 called"});
  r = fail(1, "verb");
  EXPECT_EQ(r.status, 3);
  expect_words(r, {"dp collective 11", "all_reduce of 1000 f32", "broadcast from 0 of 1000 f32"});
}

// Open MPI writes a message past the end of a receive that is too short for it.
TEST_P(Failures, ARankThatGivesMoreThanAnotherTakesWritesToNothingElse) {
  for (int rank : {0, 3}) {
    const CommandResult r = fail(rank, "more");
    EXPECT_EQ(r.status, 3) << r.output;
    expect_words(r, {"dp collective 11", "broadcast from", "of 2097152 f32", "of 1048576 f32"});
    EXPECT_EQ(r.output.find("written to"), std::string::npos) << r.output;
  }
}

TEST_P(Failures, ARankThatComputesForEverIsNamedWhenTheDeadlineHasPassed) {
  const CommandResult r = fail(1, "spin");
  EXPECT_EQ(r.status, 3);
  // A rank that waits for one that waits for rank 1 may be the first whose time is up.
  expect_report(r, {"waited 500 ms for rank ", "the rank at fault is rank 1: it does not wait",
                    "rank 1, at fault", "does not wait"});
}

// Threads die and stop together.
TEST_P(Failures, AProcessThatDiesIsNamedAtOnce) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank = 0; rank < ranks; ++rank) {
    const CommandResult r = fail(rank, "kill", "mpirun --enable-recovery");
    expect_report(
        r, {fmt::format("rank {} is gone: its process ended", rank), fmt::format("rank {}, at fault", rank)});
  }
  const CommandResult r = fail(2, "exit", "mpirun --enable-recovery");
  expect_report(r, {"rank 2 is gone"});
}

TEST_P(Failures, AProcessThatIsStoppedIsNamedWhenTheDeadlineHasPassed) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank : {0, 2}) {
    const CommandResult r = fail(rank, "stop");
    EXPECT_EQ(r.status, 3);
    // A rank that waits for one that waits for it may be the first whose time is up.
    expect_report(r, {fmt::format("the rank at fault is rank {}: silent since", rank),
                      fmt::format("rank {}, at fault", rank)});
  }
}

// It has given what the others wait for, and will not take what they send it.
TEST_P(Failures, AProcessThatIsStoppedHalfWayIsNamedToo) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank : {0, 3}) {
    const CommandResult r = fail(rank, "half");
    EXPECT_EQ(r.status, 3);
    expect_words(r, {fmt::format("the rank at fault is rank {}: silent since", rank),
                     fmt::format("rank {}, at fault", rank)});
  }
}

// MPI itself would wait for ever.
TEST_P(Failures, AProcessThatIsStoppedWhileTheOthersMakeAGroupIsNamedToo) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank : {0, 2}) {
    const CommandResult r = fail(rank, "group");
    EXPECT_EQ(r.status, 3);
    expect_words(r, {"the making of group late [0, 1, 2, 3]: rank ", "waited 500 ms for ranks ",
                     fmt::format("the rank at fault is rank {}: silent since", rank),
                     fmt::format("rank {}, at fault", rank)});
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, Failures, testing::Values("threads"));
#if HAVE_MPI
INSTANTIATE_TEST_SUITE_P(Processes, Failures, testing::Values("mpi"));
#endif

}  // namespace
