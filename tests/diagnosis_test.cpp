// Who is at fault, from the records of all ranks: a function, whatever machine the ranks ran on.
#include "comm/diagnosis.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "comm/suspension.h"
#include "turned_clock.h"

namespace echelon::diagnosis_test {
namespace {

using namespace std::chrono_literals;
using Ranks = std::vector<int>;

// Records by rank: waits for those, in "a" where nothing else is said.
RankState waits(Ranks for_ranks, const std::string& in = "a", double seconds = 2) {
  RankState s;
  s.waits_in = in;
  s.waits_for = std::move(for_ranks);
  s.seconds = seconds;
  return s;
}
RankState computes(double seconds = 2) {
  RankState s;
  s.seconds = seconds;
  return s;
}
// What was last heard of it.
RankState silent(RankState s, double age) {
  s.silent = true;
  s.age_seconds = age;
  return s;
}
RankState gone(RankState s, double age) {
  s.gone = true;
  s.age_seconds = age;
  return s;
}
std::vector<RankState> numbered(std::vector<RankState> states) {
  for (std::size_t r = 0; r < states.size(); ++r) states[r].rank = static_cast<int>(r);
  return states;
}
Diagnosis of(std::vector<RankState> states, int waiting = 0, double given_up = 0) {
  return diagnose(numbered(std::move(states)), waiting, given_up);
}

void expect_fault(const Diagnosis& d, int rank, const std::string& why) {
  EXPECT_EQ(d.at_fault, rank) << d.verdict;
  EXPECT_EQ(d.circle, Ranks{}) << d.verdict;
  EXPECT_EQ(d.verdict, "; the rank at fault is rank " + std::to_string(rank) + ": " + why);
}
void expect_circle(const Diagnosis& d, const Ranks& ranks) {
  EXPECT_EQ(d.at_fault, -1) << d.verdict;
  EXPECT_EQ(d.circle, ranks) << d.verdict;
}

TEST(Diagnosis, ARankThatDoesNotWaitKeepsTheOthers) {
  expect_fault(of({waits({1}), computes(7)}), 1, "it does not wait, since 7.0 s");
  // By way of others that wait, in the same operation and in another.
  expect_fault(of({waits({1}), waits({2}, "b"), waits({3}, "b"), computes(3)}), 3,
               "it does not wait, since 3.0 s");
  // Of several, the one that has computed longest; of those that nobody waits for none.
  expect_fault(of({waits({1, 2}), computes(1), computes(2), computes(9)}), 2,
               "it does not wait, since 2.0 s");
}

TEST(Diagnosis, RanksThatWaitForOneAnotherAreNamed) {
  const Diagnosis two = of({waits({1}, "tp collective 2"), waits({0}, "dp collective 1")});
  expect_circle(two, {0, 1});
  EXPECT_EQ(two.verdict,
            "; ranks 0, 1 wait for one another: rank 0 in tp collective 2 for rank 1; rank 1 in dp "
            "collective 1 for rank 0");
  // Rank 0 stands before the circle, not in it, and rank 4 waits for it too.
  expect_circle(of({waits({1}), waits({2}, "b"), waits({3}, "c"), waits({1}, "d"), waits({1}, "b")}),
                {1, 2, 3});
  // All of them must wait: one that computes is the one to look at.
  expect_fault(of({waits({1}), waits({2}, "b"), computes(5), waits({0}, "d")}), 2,
               "it does not wait, since 5.0 s");
  EXPECT_EQ(of({waits({0})}).verdict, "; rank 0 waits for itself");
}

// They have come to one operation, and do not keep each other there: rank 2 has gone astray, and waits for
// one of them elsewhere.
TEST(Diagnosis, RanksInOneOperationAreNoCircleWhereThereIsAnother) {
  expect_circle(of({waits({1, 2}, "group"), waits({0, 2}, "group"), waits({0}, "b")}), {0, 2});
  const Diagnosis stuck = of({waits({1}), waits({0})});
  expect_circle(stuck, {0, 1});
  EXPECT_EQ(stuck.verdict, "; ranks 0, 1 have all come there, and what they sent each other does not arrive");
}

// What was last heard of rank 2 is that it waited for rank 1: that was so 2.5 seconds ago.
TEST(Diagnosis, ASilentRankOutranksACircleThroughIt) {
  expect_fault(of({waits({1}), waits({2}, "b"), silent(waits({1}, "c", 0.1), 2.5)}), 2,
               "silent since 2.5 s (stopped, or its machine is)");
  expect_fault(of({waits({1}), waits({0, 2}, "b"), silent(waits({0}, "c"), 2.5)}), 2,
               "silent since 2.5 s (stopped, or its machine is)");
  // And one that computes: it may compute because nothing has come to it yet.
  expect_fault(of({waits({1, 2}), computes(9), silent(computes(), 1.5)}), 2,
               "silent since 1.5 s (stopped, or its machine is)");
  // Of two the one that has been silent for longer.
  expect_fault(of({waits({1, 2}), silent(computes(), 1.5), silent(computes(), 4)}), 2,
               "silent since 4.0 s (stopped, or its machine is)");
  // A circle that does not lead to it is one.
  expect_circle(of({waits({1}), waits({0}, "b"), silent(computes(), 9)}), {0, 1});
}

TEST(Diagnosis, AProcessThatEndedOutranksASilentOne) {
  expect_fault(of({waits({1, 2}), silent(computes(), 9), gone(waits({0}), 1)}), 2, "its process ended");
  expect_circle(of({waits({1}), waits({0}, "b"), gone(computes(), 9)}), {0, 1});
}

TEST(Diagnosis, WhereItIsNotKnownWhomARankWaitsForNobodyIsBlamedForNothing) {
  const Diagnosis d = of({waits({1}), waits({}, "b")});
  EXPECT_EQ(d.at_fault, -1);
  EXPECT_EQ(d.circle, Ranks{});
  EXPECT_EQ(d.verdict, "; which rank is at fault cannot be told: nobody knows what holds up rank 1");
  // That it leads back is not known either.
  EXPECT_EQ(of({waits({1}), waits({0, 2}, "b"), waits({}, "c")}).circle, Ranks{});
  // Who is silent or gone is found nevertheless.
  expect_fault(of({waits({1}), waits({}, "b"), silent(computes(), 3)}), 2,
               "silent since 3.0 s (stopped, or its machine is)");
  expect_fault(of({waits({1}), waits({}, "b"), gone(computes(), 3)}), 2, "its process ended");
  // Who computes elsewhere is not.
  EXPECT_EQ(of({waits({1}), waits({}, "b"), computes()}).at_fault, -1);
}

TEST(Diagnosis, WhatIsOnlyToBeTakenHoldsUpNobodyWhereItsTakerIsThere) {
  RankState sends = waits({2}, "b");
  sends.to_take = true;
  EXPECT_EQ(of({waits({1}), sends, computes()}).at_fault, -1);
  expect_fault(of({waits({1}), sends, silent(computes(), 3)}), 2,
               "silent since 3.0 s (stopped, or its machine is)");
}

// Records are put together after a wait was given up; until all have heard of it some go on.
TEST(Diagnosis, ARankThatCameAfterTheWaitWasGivenUpIsNoPartOfACircle) {
  const std::vector<RankState> states{waits({1}), waits({0}, "b", 0.25)};
  expect_fault(of(states, 0, 0.5), 1, "it came too late, and waits since 0.2 s");
  expect_circle(of(states, 0, 0.125), {0, 1});
  // What was said before counts from when it was said.
  std::vector<RankState> older = states;
  older[1].age_seconds = 0.5;
  expect_circle(of(older, 0, 0.5), {0, 1});
}

// Any records: the verdict follows from what is reached, and never contradicts them.
TEST(Diagnosis, OfRandomRecordsIsWhatTheySay) {
  std::mt19937 random(7);
  int circles = 0, faults = 0, unknown = 0;
  for (int trial = 0; trial < 20'000; ++trial) {
    const int n = 2 + static_cast<int>(random() % 6);
    std::vector<RankState> states;
    for (int r = 0; r < n; ++r) {
      Ranks others;
      for (int other = 0; other < n; ++other)
        if (other != r && random() % 3 == 0) others.push_back(other);
      // Of one that waits for nobody it is not known for whom; rarely.
      if (others.empty() && random() % 4 != 0) others.push_back((r + 1) % n);
      RankState s = waits(others, std::string(1, static_cast<char>('a' + random() % 3)),
                          1 + 0.1 * static_cast<double>(random() % 20));
      if (random() % 12 == 0) s = computes(0.1 * static_cast<double>(random() % 20));
      s.to_take = random() % 16 == 0;
      if (random() % 16 == 0) s = silent(s, 1 + static_cast<double>(random() % 9));
      if (random() % 24 == 0) s = gone(s, 1 + static_cast<double>(random() % 9));
      states.push_back(s);
    }
    states[0] = waits({1});
    const std::vector<RankState> all = numbered(states);
    const Diagnosis d = diagnose(all, 0, 0);
    // Reached by going on from rank to rank, here by widening a set until it grows no more.
    const auto there = [&](int r) {
      return !all[static_cast<std::size_t>(r)].silent && !all[static_cast<std::size_t>(r)].gone;
    };
    std::set<int> reached{0};
    bool known = true;
    for (std::size_t before = 0; before != reached.size();) {
      before = reached.size();
      for (int r : std::set<int>(reached)) {
        const RankState& s = all[static_cast<std::size_t>(r)];
        if (!there(r) || s.waits_in.empty()) continue;
        bool any = false;
        for (int other : s.waits_for)
          if (!s.to_take || !there(other)) any = reached.insert(other).second || true;
        known = known && any;
      }
    }
    const auto any = [&](const auto& so) {
      return std::any_of(reached.begin(), reached.end(),
                         [&](int r) { return so(all[static_cast<std::size_t>(r)]); });
    };
    const bool is_gone = any([](const RankState&s) { return s.gone; }),
               is_silent = any([](const RankState&s) { return s.silent; }),
               is_computing =
                   any([](const RankState&s) { return !s.gone && !s.silent && s.waits_in.empty(); });
    const bool elsewhere =
        !known && std::any_of(all.begin(), all.end(), [](const RankState& s) { return s.gone || s.silent; });
    if (is_gone || is_silent || is_computing || elsewhere) {
      ASSERT_GE(d.at_fault, 0) << d.verdict;
      const RankState& s = all[static_cast<std::size_t>(d.at_fault)];
      EXPECT_TRUE(s.gone || s.silent || s.waits_in.empty());
      EXPECT_TRUE(!known || reached.contains(d.at_fault));
      EXPECT_TRUE(!is_gone || s.gone);
      EXPECT_TRUE(is_gone || !is_silent || s.silent || s.gone);
      ++faults;
    } else if (!known) {
      EXPECT_EQ(d.at_fault, -1);
      EXPECT_TRUE(d.circle.empty());
      ++unknown;
    } else {
      EXPECT_EQ(d.at_fault, -1);
      ASSERT_GE(d.circle.size(), 2u);
      ++circles;
      for (int r : d.circle) {
        EXPECT_TRUE(reached.contains(r));
        // Each waits for another of them.
        const Ranks& waited = all[static_cast<std::size_t>(r)].waits_for;
        EXPECT_TRUE(std::any_of(waited.begin(), waited.end(), [&](int other) {
          return std::find(d.circle.begin(), d.circle.end(), other) != d.circle.end();
        }));
      }
    }
  }
  EXPECT_GT(circles, 500);
  EXPECT_GT(faults, 500);
  EXPECT_GT(unknown, 500);
}

// What the records are made of. A rank that waits is woken now and then, by what it does not wait for.
TEST(FlightRecorder, AWaitIsOneUntilItsOperationIsFinished) {
  checks::TurnedClock clock;
  FlightRecorder recorder(clock.time());
  const std::string group = "dp";
  const FlightRecorder::Ticket first = recorder.begin(group, 1, {.verb = Verb::barrier});
  recorder.sleep(first);
  clock.turn(1s);
  recorder.wake();
  EXPECT_EQ(recorder.state().waits_in, "");
  EXPECT_EQ(recorder.wait_seconds(), 0);
  clock.turn(1s);
  recorder.sleep(first);
  clock.turn(1s);
  EXPECT_EQ(recorder.wait_seconds(), 3);
  EXPECT_EQ(recorder.state().waits_in, "dp collective 1 (barrier)");
  EXPECT_EQ(recorder.state().seconds, 3);
  EXPECT_EQ(recorder.waited_seconds(), 1);  // asleep so far, but for this sleep
  recorder.wake();
  recorder.finish(first);
  clock.turn(1s);
  EXPECT_EQ(recorder.state().seconds, 1);
  EXPECT_EQ(recorder.state().last_finished, "dp collective 1 (barrier)");
  const FlightRecorder::Ticket second = recorder.begin(group, 2, {.verb = Verb::barrier});
  recorder.sleep(second);
  clock.turn(500ms);
  EXPECT_EQ(recorder.wait_seconds(), 0.5);
  recorder.wake();
  {
    const AnnouncedWait wait(recorder, "a message of any worker", {4, 5});
    clock.turn(2s);
    EXPECT_EQ(recorder.wait_seconds(), 2);
    EXPECT_EQ(recorder.state().waits_for, (Ranks{4, 5}));
  }
  EXPECT_EQ(recorder.state().waits_in, "");
  // One that ended by an exception stays: the rank was held up there.
  EXPECT_THROW(
      {
        const AnnouncedWait wait(recorder, "a message of any worker", {4, 5});
        throw std::runtime_error("failed");
      },
      std::runtime_error);
  EXPECT_EQ(recorder.state().waits_in, "a message of any worker");
}

TEST(Diagnosis, AWaitIsTooLongWhereSomethingIsMissing) {
  const auto heard = [](int) { return 0.0; };
  const auto too_long = [&](const RankState& s) { return waits_too_long(s, 2000ms, heard); };
  EXPECT_TRUE(too_long(waits({1}, "a", 2.01)));
  EXPECT_FALSE(too_long(waits({1}, "a", 2)));
  EXPECT_FALSE(too_long(computes(9)));
  EXPECT_FALSE(too_long(waits({}, "a", 9)));  // nobody is missing: it is being done
  RankState sends = waits({1, 2}, "a", 9);
  sends.to_take = true;
  EXPECT_FALSE(too_long(sends));
  EXPECT_FALSE(waits_too_long(sends, 2000ms, [](int rank) { return rank == 3 ? 9 : 2; }));
  EXPECT_TRUE(waits_too_long(sends, 2000ms, [](int rank) { return rank == 2 ? 2.5 : 0; }));
  EXPECT_EQ(describe_late_wait(numbered({waits({1}), waits({0, 2}, "dp collective 3")})[1], 2000ms),
            "dp collective 3: rank 1 waited 2000 ms for ranks 0, 2");
}

// A wait is counted anew behind a time in which nobody asked, as when all was stopped.
TEST(Suspensions, AreForgivenForATimeout) {
  using std::chrono::milliseconds;
  Suspension suspension;
  Clock::time_point now{};
  const auto forgives_after = [&](milliseconds time) {
    now += time;
    return suspension.forgives(now, milliseconds(4000));
  };
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(forgives_after(milliseconds(i % 2 == 0 ? 100 : 1900)));
  EXPECT_TRUE(forgives_after(milliseconds(66000)));
  for (int i = 1; i < 40; ++i) EXPECT_TRUE(forgives_after(milliseconds(100)));
  EXPECT_FALSE(forgives_after(milliseconds(100)));
}

}  // namespace
}  // namespace echelon::diagnosis_test
