// What processes conclude from what they hear of each other, on a clock that the test turns: no process, no
// socket and no second passes.
#include "comm/control_protocol.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>

namespace echelon {
namespace {

using namespace std::chrono_literals;
using Frame = ControlProtocol::Frame;

// Processes and the lines between them. What is sent on a line arrives in order, when deliver() is called.
class Processes {
 public:
  explicit Processes(int n) {
    for (int r = 0; r < n; ++r) {
      all_.push_back({std::make_unique<ControlProtocol>(r, n, now_), {}, {}});
      all_.back().stands.rank = r;
    }
  }

  struct Process {
    std::unique_ptr<ControlProtocol> protocol;
    RankState stands;
    std::deque<std::tuple<int, Frame, std::string>> inbox;
    bool stopped = false, dead = false, told = false;
  };
  Process& operator[](int r) { return all_[static_cast<std::size_t>(r)]; }

  void waits(int r, std::vector<int> for_ranks, const std::string& in, double seconds = 2.1) {
    (*this)[r].stands.waits_in = in;
    (*this)[r].stands.waits_for = std::move(for_ranks);
    (*this)[r].stands.seconds = seconds;
  }
  // A beat of every process that is there.
  void beat(std::chrono::milliseconds after = 250ms) {
    turn(after);
    for (std::size_t r = 0; r < all_.size(); ++r)
      if (!all_[r].protocol->failed())
        send(static_cast<int>(r), Frame::state, ControlProtocol::encode(all_[r].stands));
    deliver();
  }
  void turn(std::chrono::milliseconds d) { now_ += d; }
  // Its wait has lasted too long.
  void give_up(int r) { (*this)[r].protocol->fail({.why = "waited", .late = true}, now_); }
  void kill(int r) {
    (*this)[r].dead = true;
    for (Process& p : all_)
      if (!p.dead) p.inbox.emplace_back(r, Frame::goodbye, "lost");
  }
  void hold(int from, int to) { held_ = {from, to}; }
  // Everything that is under way, and what follows from it, until nothing more does.
  void deliver() {
    for (bool any = true; any;) {
      any = false;
      for (std::size_t r = 0; r < all_.size(); ++r) any = step(static_cast<int>(r)) || any;
    }
  }

  struct Said {
    int rank;
    ControlProtocol::Report report;
  };
  std::vector<Said> said;

 private:
  void send(int from, Frame type, const std::string& text) {
    if ((*this)[from].stopped || (*this)[from].dead) return;
    for (std::size_t to = 0; to < all_.size(); ++to)
      if (static_cast<int>(to) != from && !all_[to].dead) all_[to].inbox.emplace_back(from, type, text);
  }
  bool step(int r) {
    Process& p = (*this)[r];
    if (p.stopped || p.dead) return false;
    bool any = false;
    std::deque<std::tuple<int, Frame, std::string>> later;
    for (; !p.inbox.empty(); p.inbox.pop_front()) {
      const auto& [from, type, text] = p.inbox.front();
      if (held_ == std::pair(from, r)) {
        later.push_back(p.inbox.front());
        continue;
      }
      any = true;
      if (text == "lost")
        p.protocol->lose(from, now_);
      else
        p.protocol->take(from, type, text, now_);
    }
    p.inbox = later;
    if (p.protocol->failed() && !std::exchange(p.told, true)) {
      any = true;
      p.protocol->say_last_words(p.stands, now_);
      send(r, Frame::failure, ControlProtocol::encode(p.protocol->failure()));
      send(r, Frame::last_words, ControlProtocol::encode(p.stands));
    }
    if (auto report = p.protocol->report_when_due(now_)) {
      any = true;
      send(r, Frame::report, ControlProtocol::encode(report->failure));
      said.push_back({r, *report});
    }
    return any;
  }

  Clock::time_point now_{};
  std::vector<Process> all_;
  std::pair<int, int> held_{-1, -1};
};

const std::string in_sum = "dp collective 11";

// All but one wait for the one that was stopped; what it said last is that it waited in a circle with them.
Processes with_stopped(int stopped) {
  Processes all(4);
  for (int r = 0; r < 4; ++r) all.waits(r, {(r + 1) % 4}, fmt::format("pp message {}", r), 0.1);
  all.beat();
  all[stopped].stopped = true;
  for (int r = 0; r < 4; ++r)
    if (r != stopped) all.waits(r, {stopped}, in_sum);
  for (int i = 0; i < 8; ++i) all.beat();
  return all;
}

TEST(ControlProtocol, AStoppedRankIsAtFaultWhoeverGivesUpFirst) {
  for (int stopped = 0; stopped < 4; ++stopped)
    for (int first = 0; first < 4; ++first) {
      if (first == stopped) continue;
      Processes all = with_stopped(stopped);
      all.give_up(first);
      all.deliver();
      // It is not silent yet for as long as it must be: nobody speaks.
      ASSERT_TRUE(all.said.empty());
      all.turn(1100ms);
      all.deliver();
      ASSERT_EQ(all.said.size(), 1u);
      EXPECT_EQ(all.said[0].rank, first);
      const Failure& failure = all.said[0].report.failure;
      EXPECT_EQ(failure.origin, stopped) << failure.why;
      EXPECT_EQ(failure.why,
                fmt::format("waited; the rank at fault is rank {}: silent since 3.1 s (stopped, or "
                            "its machine is)",
                            stopped));
      for (const RankState& s : all.said[0].report.states) EXPECT_EQ(s.silent, s.rank == stopped);
      // And all that are there say the same to their callers.
      for (int r = 0; r < 4; ++r) {
        if (r == stopped) continue;
        EXPECT_TRUE(all[r].protocol->reported());
        EXPECT_EQ(all[r].protocol->failure().why, failure.why);
      }
    }
}

TEST(ControlProtocol, OfTwoThatGiveUpAtOnceOneSpeaks) {
  Processes all = with_stopped(1);
  all.give_up(3);
  all.give_up(2);
  all.turn(1100ms);
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].rank, 2);
  EXPECT_EQ(all.said[0].report.failure.origin, 1);
}

// Somebody gave up a wait in the same moment: what is known to have failed comes first.
TEST(ControlProtocol, AKnownCauseComesBeforeALateWait) {
  Processes all(3);
  for (int r = 0; r < 2; ++r) all.waits(r, {2}, in_sum);
  all.beat();
  all.give_up(0);
  all[2].protocol->fail({.origin = 2, .why = "rank 2 failed: disk full"}, Clock::time_point(250ms));
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].rank, 2);
  EXPECT_EQ(all.said[0].report.failure.why, "rank 2 failed: disk full");
  EXPECT_EQ(all[0].protocol->failure().why, "rank 2 failed: disk full");
}

TEST(ControlProtocol, ARealCircleIsNamedAtOnce) {
  Processes all(3);
  all.waits(0, {1}, "tp collective 2");
  all.waits(1, {0}, "dp collective 1");
  all.waits(2, {0}, "cp collective 5");
  all.beat();
  all.give_up(2);
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].report.failure.origin, -1);
  EXPECT_EQ(all.said[0].report.failure.why,
            "waited; ranks 0, 1 wait for one another: rank 0 in tp collective 2 for rank 1; rank 1 in dp "
            "collective 1 "
            "for rank 0");
}

// What was heard of rank 1 before is that it waited for rank 0; asked, it computes.
TEST(ControlProtocol, TheVerdictIsDrawnFromLastWordsNotFromOldOnes) {
  Processes all(2);
  all.waits(0, {1}, "b");
  all.waits(1, {0}, "a");
  all.beat();
  all[1].stands = {};
  all[1].stands.rank = 1;
  all[1].stands.seconds = 1.9;
  all.give_up(0);
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].report.failure.why,
            "waited; the rank at fault is rank 1: it does not wait, since 1.9 s");
}

// However slow its last words are, within what makes a rank silent.
TEST(ControlProtocol, SlowLastWordsAreWaitedFor) {
  Processes all(3);
  all.waits(0, {1}, in_sum);
  all.waits(1, {2}, in_sum);
  all.beat();
  all.give_up(0);
  all.hold(2, 0);
  for (int i = 0; i < 11; ++i) {
    all.turn(250ms);
    all.deliver();
  }
  EXPECT_TRUE(all.said.empty());
  all.hold(-1, -1);
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].report.failure.origin, 2);
  EXPECT_FALSE(all.said[0].report.states[2].silent);
}

TEST(ControlProtocol, AProcessThatDiesIsNamedByTheLowestOfTheOthers) {
  for (int dies = 0; dies < 3; ++dies) {
    Processes all(3);
    all.beat();
    all.kill(dies);
    all.deliver();
    ASSERT_EQ(all.said.size(), 1u) << dies;
    EXPECT_EQ(all.said[0].rank, dies == 0 ? 1 : 0);
    EXPECT_EQ(all.said[0].report.failure.origin, dies);
    EXPECT_EQ(all.said[0].report.failure.why, fmt::format("rank {} is gone: its process ended", dies));
    EXPECT_TRUE(all.said[0].report.states[static_cast<std::size_t>(dies)].gone);
  }
}

TEST(ControlProtocol, WhereTheOneThatFoundItCannotSpeakAnotherDoes) {
  Processes all(3);
  for (int r = 0; r < 3; ++r) all.waits(r, {(r + 1) % 3}, fmt::format("pp message {}", r));
  all.beat();
  all.give_up(2);
  all[2].protocol->say_last_words(all[2].stands, Clock::time_point(250ms));
  all[0].protocol->take(2, Frame::failure, ControlProtocol::encode(all[2].protocol->failure()),
                        Clock::time_point(250ms));
  all[2].stopped = true;
  for (int i = 0; i < 24; ++i) {
    all.turn(250ms);
    all.deliver();
  }
  EXPECT_TRUE(all.said.empty());
  all.turn(250ms);
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].rank, 0);
  EXPECT_EQ(all.said[0].report.failure.origin, 2);
}

// Nobody is left who would: the rank may end.
TEST(ControlProtocol, NobodyWaitsForAReportForEver) {
  ControlProtocol alone(1, 2, Clock::time_point());
  alone.take(0, Frame::failure,
             ControlProtocol::encode(Failure{.why = "waited", .late = true, .found_by = 0}),
             Clock::time_point());
  alone.take(0, Frame::last_words, ControlProtocol::encode(RankState{}), Clock::time_point());
  alone.say_last_words({}, Clock::time_point());
  for (const auto at : {1s, 6s, 9s}) {
    EXPECT_FALSE(alone.report_when_due(Clock::time_point(at)));
    EXPECT_FALSE(alone.reported());
  }
  EXPECT_FALSE(alone.report_when_due(Clock::time_point(9001ms)));
  EXPECT_TRUE(alone.reported());
}

TEST(ControlProtocol, RoundsAreFinishedTogether) {
  ControlProtocol p(0, 3, Clock::time_point());
  p.take(1, Frame::done, "", Clock::time_point());
  EXPECT_EQ(p.unfinished(), std::vector<int>{});
  p.finish_round();
  EXPECT_EQ(p.unfinished(), std::vector<int>{2});
  p.take(2, Frame::done, "", Clock::time_point());
  EXPECT_EQ(p.unfinished(), std::vector<int>{});
  // One that says goodbye may end.
  p.take(2, Frame::goodbye, "", Clock::time_point());
  p.lose(2, Clock::time_point());
  EXPECT_FALSE(p.failed());
  p.lose(1, Clock::time_point());
  EXPECT_EQ(p.failure().origin, 1);
}

}  // namespace
}  // namespace echelon
