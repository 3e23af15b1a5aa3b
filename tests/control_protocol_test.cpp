// What processes conclude from what they hear of each other, on a clock that the test turns: no process, no
// socket and no second passes.
#include "comm/control_protocol.h"
#include "case_choice.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>

namespace echelon::control_protocol_test {
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
    bool stopped = false, dead = false, said_last_words = false;
    bool comes_back = true;  // its rank's thread, as soon as it knows
    std::string cause{};     // why it failed by itself
    bool is_back = false;
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
      if (!all_[r].protocol->failed()) send(static_cast<int>(r), Frame::state, encode(all_[r].stands));
    deliver();
  }
  void turn(std::chrono::milliseconds d) { now_ += d; }
  // By itself.
  void fail(int r, const std::string& cause) {
    (*this)[r].cause = cause;
    (*this)[r].protocol->fail({.origin = r, .why = fmt::format("rank {} failed: {}", r, cause)}, now_);
  }
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
    if (const auto failure = p.protocol->failure_to_tell()) {
      any = true;
      send(r, Frame::failure, encode(*failure));
    }
    if (p.protocol->failed() && !std::exchange(p.said_last_words, true)) {
      any = true;
      p.protocol->say_last_words(p.stands, now_);
      send(r, Frame::last_words, encode(p.stands));
    }
    if (p.protocol->failed() && p.comes_back && !std::exchange(p.is_back, true)) {
      any = true;
      p.protocol->come_back(p.cause);
      send(r, Frame::back, p.cause);
    }
    if (auto report = p.protocol->report_when_due(now_)) {
      any = true;
      send(r, Frame::report, encode(report->failure));
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
  all[0].protocol->take(2, Frame::failure, encode(all[2].protocol->failure()), Clock::time_point(250ms));
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

// Whoever should have spoken is mute, and so is the next: the rank speaks itself before it ends.
TEST(ControlProtocol, ARankThatHearsNobodySpeakSpeaksItself) {
  ControlProtocol last(2, 3, Clock::time_point());
  for (int other : {0, 1}) {
    last.take(other, Frame::failure, encode(Failure{.why = "waited", .late = true, .found_by = 1}),
              Clock::time_point());
    last.take(other, Frame::last_words, encode(RankState{}), Clock::time_point());
  }
  last.say_last_words({}, Clock::time_point());
  for (const auto at : {1s, 6s, 9s}) {
    EXPECT_FALSE(last.report_when_due(Clock::time_point(at)));
    EXPECT_FALSE(last.reported());
  }
  EXPECT_TRUE(last.report_when_due(Clock::time_point(9001ms)));
  EXPECT_TRUE(last.reported());
}

// The one that would speak has died: nobody waits for it, since mpirun ends the others a moment later.
TEST(ControlProtocol, WhereTheOneThatFoundItDiesAnotherSpeaksAtOnce) {
  Processes all(4);
  all.beat();
  all.fail(0, "disk full");
  all[1].comes_back = false;
  all.deliver();
  EXPECT_TRUE(all.said.empty());
  all.kill(0);
  all[1].comes_back = true;
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].rank, 1);
  EXPECT_EQ(all.said[0].report.failure.why, "rank 0 failed: disk full");
}

// What a rank says of itself is worth more than that its process ended.
TEST(ControlProtocol, ACauseComesBeforeTheConnectionThatItEnded) {
  Processes all(4);
  all.beat();
  all.hold(3, 0);
  all.fail(3, "disk full");
  all[1].comes_back = false;
  all.deliver();
  all.hold(-1, -1);
  all[0].protocol->lose(3, Clock::time_point(250ms));
  all[1].comes_back = true;
  all.kill(3);
  all.deliver();
  ASSERT_GE(all.said.size(), 1u);
  for (const auto& said : all.said) EXPECT_EQ(said.report.failure.why, "rank 3 failed: disk full");
}

TEST(ControlProtocol, RanksThatFailTogetherAreAllNamed) {
  Processes all(4);
  all.beat();
  for (int r : {2, 1, 3}) all.fail(r, fmt::format("disk {} full", r));
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].rank, 1);
  EXPECT_EQ(all.said[0].report.failure.why, "rank 1 failed: disk 1 full");
  EXPECT_EQ(all.said[0].report.further,
            (std::vector<std::string>{"rank 2 failed too: disk 2 full", "rank 3 failed too: disk 3 full"}));
}

// One that is still at it may fail by itself too; it is waited for as long as that takes on a full disk.
TEST(ControlProtocol, TheReportWaitsALittleForFurtherCauses) {
  Processes all(3);
  all.beat();
  all[2].comes_back = false;
  all.fail(0, "disk full");
  all.deliver();
  EXPECT_TRUE(all.said.empty());
  all[2].cause = "disk full here too";
  all[2].comes_back = true;
  all.turn(100ms);
  all.deliver();
  ASSERT_EQ(all.said.size(), 1u);
  EXPECT_EQ(all.said[0].report.further, std::vector<std::string>{"rank 2 failed too: disk full here too"});

  Processes stuck(3);
  stuck.beat();
  stuck[2].comes_back = false;
  stuck.fail(0, "disk full");
  stuck.deliver();
  EXPECT_TRUE(stuck.said.empty());
  stuck.turn(ControlProtocol::settling + 1ms);
  stuck.deliver();
  EXPECT_EQ(stuck.said.size(), 1u);
}

// A rank whose line has lost the word of the failure goes on beating: it must not keep the others from
// speaking.
TEST(ControlProtocol, ARankThatNeverHearsOfItIsNotWaitedForForEver) {
  ControlProtocol p(0, 2, Clock::time_point());
  p.fail({.origin = 0, .why = "rank 0 failed: disk full"}, Clock::time_point());
  p.say_last_words({}, Clock::time_point());
  p.come_back("disk full");
  bool spoke = false;
  for (auto at = 0ms; at < 6s && !spoke; at += 250ms) {
    p.take(1, Frame::state, encode(RankState{}), Clock::time_point(at));
    spoke = p.report_when_due(Clock::time_point(at)).has_value();
  }
  EXPECT_TRUE(spoke);
}

// Processes of which any fails, dies, is stopped, comes back or hears of it at any moment, in any order;
// lines keep their own. One that takes it that somebody has spoken ends, and with it, a moment later, mpirun
// everything: so nobody may take it so before it is true.
class RandomEnd {
 public:
  explicit RandomEnd(std::uint32_t seed) : random_(seed), size_(2 + below(5)) {
    for (int r = 0; r < size_; ++r) all_.push_back(std::make_unique<Process>(r, size_, now_));
  }

  void run() {
    for (int i = 0; i < 400 && !everybody_has_ended(); ++i) act();
    any_failed_ = everybody_has_ended() || std::any_of(all_.begin(), all_.end(), [](const auto& p) {
                    return p->is_there() && p->protocol.failed();
                  });
    if (!any_failed_) return;
    for (int i = 0; i < 400 && !everybody_has_ended(); ++i) {
      while (deliver_any()) {
      }
      for (int r = 0; r < size_; ++r) follow(r);
      now_ += 100ms;
    }
    EXPECT_TRUE(everybody_has_ended());
    EXPECT_GE(num_spoke_, 1);
  }
  bool any_failed() const { return any_failed_; }
  int num_spoke() const { return num_spoke_; }

 private:
  struct Process {
    Process(int rank, int size, Clock::time_point now) : protocol(rank, size, now) {}
    bool is_there() const { return !dead && !stopped && !ended; }
    ControlProtocol protocol;
    std::string cause;
    bool dead = false, stopped = false, ended = false, said_last_words = false, is_back = false;
  };
  using Line = std::deque<std::pair<Frame, std::string>>;  // a frame that is no frame: the end of the line

  int below(int n) { return static_cast<int>(random_() % static_cast<std::uint32_t>(n)); }
  Process& process(int r) { return *all_[static_cast<std::size_t>(r)]; }
  static constexpr auto end_of_line = static_cast<Frame>(255);

  void send(int from, Frame type, const std::string& text) {
    for (int to = 0; to < size_; ++to)
      if (to != from) lines_[{from, to}].emplace_back(type, text);
  }
  void act() {
    const int r = below(size_);
    Process& p = process(r);
    switch (below(40)) {
      case 0:
        if (p.is_there() && !p.is_back) {
          p.cause = fmt::format("cause {}", r);
          p.protocol.fail({.origin = r, .why = fmt::format("rank {} failed: {}", r, p.cause)}, now_);
        }
        return;
      case 1:
        if (p.is_there()) p.protocol.fail({.why = "waited", .late = true}, now_);
        return;
      case 2:  // the last one that is there stays
        if (p.is_there() && below(3) == 0 && num_there() > 1) {
          p.dead = true;
          send(r, end_of_line, "");
        }
        return;
      case 3:
        if (p.is_there() && below(3) == 0 && num_there() > 1) p.stopped = true;
        return;
      case 4:
        now_ += std::chrono::milliseconds(below(below(4) == 0 ? 4000 : 100));
        return;
      default:
        break;
    }
    if (below(2) == 0)
      deliver_any();
    else
      follow(r);
  }
  int num_there() const {
    return static_cast<int>(
        std::count_if(all_.begin(), all_.end(), [](const auto& p) { return p->is_there(); }));
  }
  bool deliver_any() {
    std::vector<std::pair<int, int>> full;
    for (const auto& [ends, line] : lines_)
      if (!line.empty() && process(ends.second).is_there()) full.push_back(ends);
    if (full.empty()) return false;
    const auto [from, to] = full[static_cast<std::size_t>(below(static_cast<int>(full.size())))];
    const auto [type, text] = lines_[{from, to}].front();
    lines_[{from, to}].pop_front();
    if (type == end_of_line)
      process(to).protocol.lose(from, now_);
    else
      process(to).protocol.take(from, type, text, now_);
    return true;
  }
  // What the listening thread of a process does.
  void follow(int r) {
    Process& p = process(r);
    if (!p.is_there()) return;
    if (const auto failure = p.protocol.failure_to_tell()) send(r, Frame::failure, encode(*failure));
    if (p.protocol.failed() && !std::exchange(p.said_last_words, true)) {
      p.protocol.say_last_words({}, now_);
      send(r, Frame::last_words, encode(RankState{}));
    }
    if (p.protocol.failed() && below(3) == 0 && !std::exchange(p.is_back, true)) {
      p.protocol.come_back(p.cause);
      send(r, Frame::back, p.cause);
    }
    if (const auto report = p.protocol.report_when_due(now_)) {
      ++num_spoke_;
      send(r, Frame::report, encode(report->failure));
    }
    if (p.protocol.reported()) {
      ASSERT_GE(num_spoke_, 1) << "rank " << r << " ends, and nobody has said why";
      p.ended = true;
      send(r, end_of_line, "");
    }
  }
  bool everybody_has_ended() const { return num_there() == 0; }

  std::mt19937 random_;
  int size_;
  Clock::time_point now_{};
  std::vector<std::unique_ptr<Process>> all_;
  std::map<std::pair<int, int>, Line> lines_;
  int num_spoke_ = 0;
  bool any_failed_ = false;
};

TEST(ControlProtocol, SomeoneAlwaysSpeaks) {
  const std::uint32_t seeds = static_cast<std::uint32_t>(checks::so_many(1000, 5000));
  int failed = 0, spoke_once = 0;
  for (std::uint32_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    RandomEnd end(seed);
    end.run();
    if (testing::Test::HasFailure()) return;
    failed += end.any_failed() ? 1 : 0;
    spoke_once += end.num_spoke() == 1 ? 1 : 0;
  }
  EXPECT_GT(failed, static_cast<int>(seeds) * 3 / 5);
  EXPECT_GT(spoke_once, failed * 3 / 4);
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
}  // namespace echelon::control_protocol_test
