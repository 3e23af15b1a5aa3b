#include "tensor/thread_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "case_choice.h"

namespace echelon::thread_team_test {
namespace {

TEST(ThreadTeam, EveryTaskIsDoneOnceByAThreadOfTheTeam) {
  for (int threads : {1, 2, 5}) {
    const ThreadTeam team(threads);
    EXPECT_EQ(team.threads(), threads);
    for (std::int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> done(static_cast<std::size_t>(count));
      std::atomic<bool> known = true;
      team.each_task(count, [&](std::int64_t i, int thread) {
        ++done[static_cast<std::size_t>(i)];
        if (thread < 0 || thread >= threads) known = false;
      });
      EXPECT_TRUE(known);
      for (const auto& times : done) EXPECT_EQ(times, 1);
    }
  }
}

// The same error on any number of threads: that of the first task, and none behind it is begun once it is
// known.
TEST(ThreadTeam, TheFirstErrorOfTasksIsThrown) {
  for (int threads : {1, 2, 5}) {
    const ThreadTeam team(threads);
    std::vector<std::atomic<int>> done(1000);
    const auto message = [&] {
      try {
        team.each_task_that_may_throw(1000, [&](std::int64_t i, int) {
          if (i == 100 || i == 103 || i > 900) throw std::runtime_error(std::to_string(i));
          ++done[static_cast<std::size_t>(i)];
        });
      } catch (const std::runtime_error& error) {
        return std::string(error.what());
      }
      return std::string();
    }();
    EXPECT_EQ(message, "100");
    for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(done[i], 1);
    std::atomic<int> times{0};
    team.each_task_that_may_throw(50, [&](std::int64_t, int) { ++times; });
    EXPECT_EQ(times, 50);
  }
}

// Many short kernels one after the other, some of which the others are asleep before.
TEST(ThreadTeam, RoundsFollowEachOther) {
  const ThreadTeam team(3);
  std::vector<std::int64_t> sums(3);
  std::int64_t total = 0;
  for (int round = 0; round < checks::so_many(600, 3000); ++round) {
    if (round % 200 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    team.each_row(3, 1 << 20, [&](std::int64_t i) { sums[static_cast<std::size_t>(i)] += i + round; });
    total += 3 + 3 * round;
  }
  EXPECT_EQ(sums[0] + sums[1] + sums[2], total);
}

TEST(ThreadTeam, NeighboursAreOneThreadsAndSmallWorkIsTheCallers) {
  constexpr std::int64_t rows = 103, parts = 32;  // eight for each thread
  const ThreadTeam team(4);
  std::vector<std::thread::id> of(rows);
  const auto note = [&](std::int64_t i) { of[static_cast<std::size_t>(i)] = std::this_thread::get_id(); };
  team.each_row(rows, 1 << 20, note);
  for (std::int64_t part = 0; part < parts; ++part) {
    const Range range = split_range(rows, parts, part);
    for (std::int64_t i = range.begin; i < range.end; ++i)
      EXPECT_EQ(of[static_cast<std::size_t>(i)], of[static_cast<std::size_t>(range.begin)]);
  }
  team.each_row(rows, 1, note);
  EXPECT_EQ(std::set(of.begin(), of.end()), std::set{std::this_thread::get_id()});
}

TEST(ThreadTeam, EveryOtherThreadBeginsFirst) {
  static thread_local bool begun;
  std::atomic<int> begins{0};
  const ThreadTeam team(4, [&] {
    ++begins;
    begun = true;
  });
  std::atomic<int> unready{0};
  const std::thread::id caller = std::this_thread::get_id();
  team.each_row(4, 1 << 20, [&](std::int64_t) {
    if (std::this_thread::get_id() != caller && !begun) ++unready;
  });
  EXPECT_EQ(begins, 3);
  EXPECT_EQ(unready, 0);
}

}  // namespace
}  // namespace echelon::thread_team_test
