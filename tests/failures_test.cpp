// A rank that dies, hangs, throws or disagrees ends the job on every rank, in time, with a report that names
// it: for thread ranks and, where the build has MPI, for processes.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "run_command.h"

namespace echelon::failures_test {
namespace {

struct Result : echelon::checks::CommandResult {
  double seconds = 0;
};

Result run(const std::string& command) {
  const auto begin = std::chrono::steady_clock::now();
  Result result{echelon::checks::run_command(command), 0};
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

constexpr int timeout_ms = 2000;
constexpr int ranks = 4;

class Failures : public testing::TestWithParam<const char*> {
 protected:
  bool processes() const { return std::string(GetParam()) == "mpi"; }
  Result fail(int rank, const char* how) const {
    const std::string job =
        fmt::format("{} {} {} {} {} {}", FAILING_JOB, GetParam(), ranks, rank, how, timeout_ms);
    return run(processes() ? fmt::format("mpirun -n {} --oversubscribe {}", ranks, job) : job);
  }
  // The report is there in time, says all of this, and how each rank stood.
  void expect_report(const Result& r, const std::vector<std::string>& words) const {
    // The deadline, 2 s for the report, and what starting and ending processes takes on a busy machine.
    EXPECT_LT(r.seconds, timeout_ms / 1000.0 + 2 + 0.6 + (processes() ? 4 : 1)) << r.output;
    std::vector<std::string> all = words;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(fmt::format("\n  rank {}", rank));
    all.push_back("waits in dp collective 11 (all_reduce of 1000 f32)");
    all.push_back("at step 10");
    all.push_back("last finished ");
    all.push_back("end of report");
    for (const std::string& word : all)
      EXPECT_NE(r.output.find(word), std::string::npos) << word << " is not in: " << r.output;
    // Once, whoever says it.
    EXPECT_EQ(r.output.find("report: "), r.output.rfind("report: ")) << r.output;
  }
};

TEST_P(Failures, NoneIsNoFailure) {
  const Result r = fail(0, "none");
  EXPECT_EQ(r.status, 0) << r.output;
  EXPECT_EQ(r.output.find("report"), std::string::npos) << r.output;
}

TEST_P(Failures, ARankThatThrowsIsNamedWithItsReason) {
  for (int rank : {0, 3}) {
    const Result r = fail(rank, "throw");
    EXPECT_EQ(r.status, 3);
    expect_report(r, {fmt::format("rank {} failed: the disk of rank", rank),
                      fmt::format("rank {}, at fault", rank), "record of rank 1: "});
  }
}

TEST_P(Failures, RanksThatDisagreeAreBothNamed) {
  Result r = fail(2, "disagree");
  EXPECT_EQ(r.status, 3);
  for (const char* word : {"dp collective 11", "all_reduce of 1000 f32", "all_reduce of 7 f32",
                           "rank 0 called", "rank 2 called"})
    EXPECT_NE(r.output.find(word), std::string::npos) << word << " is not in: " << r.output;
  r = fail(1, "verb");
  EXPECT_EQ(r.status, 3);
  for (const char* word : {"dp collective 11", "all_reduce of 1000 f32", "broadcast from 0 of 1000 f32"})
    EXPECT_NE(r.output.find(word), std::string::npos) << word << " is not in: " << r.output;
}

TEST_P(Failures, ARankThatComputesForEverIsNamedWhenTheDeadlineHasPassed) {
  const Result r = fail(1, "spin");
  EXPECT_EQ(r.status, 3);
  EXPECT_GT(r.seconds, timeout_ms / 1000.0);
  // A rank that waits for one that waits for rank 1 may be the first whose time is up.
  expect_report(r, {"waited 2000 ms for rank ", "rank 1, at fault", "does not wait"});
}

// Threads die and stop together.
TEST_P(Failures, AProcessThatDiesIsNamedAtOnce) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank = 0; rank < ranks; ++rank) {
    const Result r = fail(rank, "kill");
    EXPECT_NE(r.status, 0);  // mpirun's own, of the process that was killed
    expect_report(
        r, {fmt::format("rank {} is gone: its process ended", rank), fmt::format("rank {}, at fault", rank)});
  }
  const Result r = fail(2, "exit");
  expect_report(r, {"rank 2 is gone"});
}

TEST_P(Failures, AProcessThatIsStoppedIsNamedWhenTheDeadlineHasPassed) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank : {0, 2}) {
    const Result r = fail(rank, "stop");
    EXPECT_EQ(r.status, 3);
    EXPECT_GT(r.seconds, timeout_ms / 1000.0);
    // A rank that waits for one that waits for it may be the first whose time is up.
    expect_report(r, {fmt::format("the rank at fault is rank {}", rank),
                      fmt::format("rank {}, at fault", rank), "silent since"});
  }
}

// It has given what the others wait for, and will not take what they send it.
TEST_P(Failures, AProcessThatIsStoppedHalfWayIsNamedToo) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank : {0, 3}) {
    const Result r = fail(rank, "half");
    EXPECT_EQ(r.status, 3);
    EXPECT_LT(r.seconds, timeout_ms / 1000.0 + 2 + 0.6 + 4) << r.output;
    for (const std::string& word : {fmt::format("the rank at fault is rank {}", rank),
                                    fmt::format("rank {}, at fault", rank), std::string("silent since")})
      EXPECT_NE(r.output.find(word), std::string::npos) << word << " is not in: " << r.output;
  }
}

// MPI itself would wait for ever.
TEST_P(Failures, AProcessThatIsStoppedWhileTheOthersMakeAGroupIsNamedToo) {
  if (!processes()) GTEST_SKIP() << "thread ranks share one process";
  for (int rank : {0, 2}) {
    const Result r = fail(rank, "group");
    EXPECT_EQ(r.status, 3);
    // Their threads are in MPI, and are left there four seconds after the failure.
    EXPECT_LT(r.seconds, timeout_ms / 1000.0 + 2 + 0.6 + 4 + 4) << r.output;
    for (const std::string& word :
         {std::string("the making of group late [0, 1, 2, 3]: rank "), std::string("waited 2000 ms for "),
          fmt::format("the rank at fault is rank {}", rank), fmt::format("rank {}, at fault", rank)})
      EXPECT_NE(r.output.find(word), std::string::npos) << word << " is not in: " << r.output;
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, Failures, testing::Values("threads"));
#if HAVE_MPI
INSTANTIATE_TEST_SUITE_P(Processes, Failures, testing::Values("mpi"));
#endif

}  // namespace
}  // namespace echelon::failures_test
