// What runs together hides messages: the rule of simulate.h, against programs that ranks could run.
#include "schedule/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>

#include "refusals.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"
#include "schedule/text.h"
#include "schedule/validate.h"

namespace echelon::simulate_test {
namespace {

SimulationCosts costs_of(const Schedule& schedule, double message, StageTimes full = {}, double factor = 1) {
  const double part = schedule.stage_fraction();
  SimulationCosts costs;
  costs.stages = {{full.forward * part, full.backward_input * part, full.backward_weight * part}};
  costs.message = message;
  costs.overlap_factor = factor;
  return costs;
}

double makespan(const Schedule& schedule, double message) {
  return simulate(schedule, costs_of(schedule, message)).timeline.makespan();
}

double seconds(const Instruction& i, const SimulationCosts& costs) {
  const StageTimes& t = costs.of(i.stage);
  return i.op == Op::F   ? t.forward
         : i.op == Op::B ? t.backward_input
         : i.op == Op::W ? t.backward_weight
                         : t.backward_input + t.backward_weight;
}

// Ranks that run the lowered program one instruction after the other: when the last one ends.
double run_in_order(const Schedule& schedule, const SimulationCosts& costs) {
  const Schedule program = lower(schedule);
  const std::size_t ranks = program.ranks.size();
  std::vector<std::size_t> next(ranks, 0);
  std::vector<double> now(ranks, 0);
  struct Channel {
    double free = 0;
    std::deque<double> arrivals;
  };
  std::map<std::pair<int, int>, Channel> channels;
  for (bool more = true; more;) {
    more = false;
    for (std::size_t r = 0; r < ranks; ++r)
      for (; next[r] < program.ranks[r].size(); ++next[r], more = true) {
        const Instruction& i = program.ranks[r][next[r]];
        const int rank = static_cast<int>(r);
        if (i.op == Op::send) {
          Channel& c = channels[{rank, i.peer}];
          c.free = std::max(now[r], c.free) + costs.message;
          c.arrivals.push_back(c.free);
        } else if (i.op == Op::recv) {
          Channel& c = channels[{i.peer, rank}];
          if (c.arrivals.empty()) break;
          now[r] = std::max(now[r], c.arrivals.front());
          c.arrivals.pop_front();
        } else {
          now[r] += seconds(i, costs);
        }
      }
  }
  for (std::size_t r = 0; r < ranks; ++r) EXPECT_EQ(next[r], program.ranks[r].size());
  return *std::max_element(now.begin(), now.end());
}

// Every pair as one instruction: nothing starts before all inputs are there, nothing leaves before all is
// done.
double run_without_hiding(const Schedule& schedule, const SimulationCosts& costs) {
  const std::size_t ranks = schedule.ranks.size();
  std::vector<std::size_t> next(ranks, 0);
  std::vector<double> now(ranks, 0);
  std::map<Value, std::pair<int, double>> made;  // where and when
  std::map<std::pair<int, int>, double> free;    // of a channel
  std::map<Value, int> reader;
  for (std::size_t r = 0; r < ranks; ++r)
    for (const Instruction& i : schedule.ranks[r])
      for (const Value& v : reads(schedule, i)) reader[v] = static_cast<int>(r);
  for (bool more = true; more;) {
    more = false;
    for (std::size_t r = 0; r < ranks; ++r)
      while (next[r] < schedule.ranks[r].size()) {
        const auto& list = schedule.ranks[r];
        std::size_t end = next[r] + 1;
        while (list[end - 1].overlaps_next) ++end;
        double begin = now[r], length = 0;
        bool is_ready = true;
        for (std::size_t k = next[r]; k < end; ++k) {
          length += seconds(list[k], costs);
          for (const Value& v : reads(schedule, list[k])) {
            if (v.kind != ValueKind::activation && v.kind != ValueKind::gradient) continue;
            const auto found = made.find(v);
            is_ready = is_ready && found != made.end();
            if (found != made.end()) begin = std::max(begin, found->second.second);
          }
        }
        if (!is_ready) break;
        now[r] = begin + length;
        for (; next[r] < end; ++next[r])
          for (const Value& v : writes(schedule, list[next[r]])) {
            const auto to = reader.find(v);
            double at = now[r];
            if (to != reader.end() && to->second != static_cast<int>(r)) {
              double& channel = free[{static_cast<int>(r), to->second}];
              at = channel = std::max(at, channel) + costs.message;
            }
            made[v] = {static_cast<int>(r), at};
          }
        more = true;
      }
  }
  return *std::max_element(now.begin(), now.end());
}

TEST(Simulate, APairHidesTheMessagesOfItsParts) {
  // Rank 1 works for 3 on microbatch 0, then hands the gradient to the pair of rank 0.
  const Schedule s = from_text("0F0 (0F1;0BW0) 0BW1\n1F0 1BW0 1F1 1BW1\n", "pair");
  validate(s);
  const auto spans_of = [&](double message) {
    const Simulation simulation = simulate(s, costs_of(s, message));
    std::vector<std::pair<double, double>> spans;
    for (const Span& span : simulation.timeline.ranks[0]) spans.emplace_back(span.begin, span.end);
    return spans;
  };
  using Spans = std::vector<std::pair<double, double>>;
  // The pair runs 0F1 in 1..2, then 0BW0 waits for its input: 1F0 in 1..2, 1BW0 in 2..4.
  EXPECT_EQ(spans_of(0), (Spans{{0, 1}, {1, 2}, {4, 6}, {9, 11}}));
  // 0F1 leaves at 2 and travels while 0BW0 waits and runs (until 7): rank 1 has it at 7, not at 2 + 0.5.
  EXPECT_EQ(spans_of(0.5), (Spans{{0, 1}, {1, 2}, {5, 7}, {10.5, 12.5}}));
  // One that takes longer than the rest of the pair is late by what is left.
  const Simulation slow = simulate(s, costs_of(s, 10));
  EXPECT_EQ(slow.timeline.ranks[0][2].begin, 24);  // 1 + 10, 1F0 1BW0, + 10
  EXPECT_EQ(slow.timeline.ranks[1][2].begin, 26);  // sent at 2, there at 12, counted at the pair's end
}

TEST(Simulate, AnInputOfTheSecondPartMayTravelWhileTheFirstComputes) {
  const Schedule s = from_text("0F0 0F1 (0F2;0BW0) 0BW1 0BW2\n1F0 1BW0 1F1 1BW1 1F2 1BW2\n", "pair");
  SimulationCosts costs;
  costs.stages = {{3, 1, 1}, {1, 1, 0}};
  costs.message = 3;
  // 0F2 runs in 6..9; the gradient left rank 1 at 8 and arrives at 11.
  Simulation simulation = simulate(s, costs);
  EXPECT_EQ(simulation.timeline.ranks[0][2].begin, 6);
  EXPECT_EQ(simulation.timeline.ranks[0][2].end, 9);
  EXPECT_EQ(simulation.timeline.ranks[0][3].begin, 11);
  EXPECT_EQ(simulation.timeline.busy(0), 15);  // waiting is not work
  costs.message = 2;                           // left at 7, arrives at 9: just in time
  simulation = simulate(s, costs);
  EXPECT_EQ(simulation.timeline.ranks[0][2].begin, simulation.timeline.ranks[0][3].begin);
  EXPECT_EQ(simulation.timeline.ranks[0][3].end, 11);
  costs.overlap_factor = 0.5;  // 0F2 until 7.5, from 9 on half of 2
  EXPECT_EQ(simulate(s, costs).timeline.ranks[0][3].end, 10);
}

std::vector<Schedule> with_pairs(int ranks, int microbatches) {
  std::vector<Schedule> all{dualpipe_v(ranks, microbatches)};
  if (ranks % 2 == 0 && microbatches % 2 == 0) all.push_back(dualpipe(ranks, microbatches));
  return all;
}

TEST(Simulate, PairsLieBetweenTakingTurnsAndWaitingForEverything) {
  for (int ranks : {2, 3, 4, 6, 8})
    for (int microbatches : {2 * ranks, 2 * ranks + 3, 4 * ranks})
      for (double message : {0.0, 0.1, 0.5, 1.0, 3.0})
        for (const StageTimes full : {StageTimes{}, {1, 1.5, 0.5}, {2, 1, 1.3}})
          for (const Schedule& s : with_pairs(ranks, microbatches)) {
            SCOPED_TRACE(testing::Message()
                         << s.name << " P=" << ranks << " M=" << microbatches << " message " << message);
            const SimulationCosts costs = costs_of(s, message, full);
            const Simulation simulation = simulate(s, costs);
            const double found = simulation.timeline.makespan();
            // Without message time nothing is hidden: the published values.
            const double turns = run_in_order(s, costs), waits = run_without_hiding(s, costs);
            EXPECT_LE(turns, found * (1 + 1e-12));
            EXPECT_LE(found, waits * (1 + 1e-12));
            if (message == 0) {
              EXPECT_NEAR(found, waits, 1e-9 * waits);
            }
            const double work = microbatches * (full.forward + full.backward_input + full.backward_weight);
            EXPECT_GE(found, work * (1 - 1e-12));
            for (int r = 0; r < ranks; ++r) EXPECT_NEAR(simulation.timeline.busy(r), work, 1e-9 * work);
            // Faster pairs do no harm.
            EXPECT_LE(simulate(s, costs_of(s, message, full, 0.8)).timeline.makespan(), found * (1 + 1e-12));
          }
}

// P microbatches more cost their work and no message as long as a message is no longer than a part of a pair.
// 1F1B has P of them under way at once, each of which goes all the way there and back: 2(P-1) messages.
TEST(Simulate, TheSteadyStateOfPairsHidesMessages) {
  for (int p : {4, 6, 8})
    for (double message : {0.0, 0.2, 0.5}) {
      const auto grows = [&](const auto& make) {
        return makespan(make(p, 7 * p), message) - makespan(make(p, 6 * p), message);
      };
      EXPECT_NEAR(grows(dualpipe), 3 * p, 1e-9);
      EXPECT_NEAR(grows(dualpipe_v), 3 * p, 1e-9);
      EXPECT_NEAR(grows(one_f_one_b), 3 * p + 2 * (p - 1) * message, 1e-9);
    }
}

// Of a program that made it, without check_rules(): such an instruction was looked up outside of the tables.
TEST(Simulate, WhatIsOfNoStageIsRefused) {
  const Schedule good = one_f_one_b(2, 3);
  const auto refused = [](const Schedule& schedule, const SimulationCosts& costs, const char* words) {
    checks::expect_refusal([&] { simulate(schedule, costs); }, {words});
  };
  Schedule bad = good;
  bad.ranks[0][0].stage = 2;
  refused(bad, {}, "rank 0, instruction 0 (2F0): there is no such stage; legal: 0 to 1");
  bad = good, bad.ranks[1][0].microbatch = -1;
  refused(bad, {}, "there is no such microbatch; legal: 0 to 2");
  bad = good, bad.ranks[0].push_back({.op = Op::send, .peer = 1});
  refused(bad, {}, "no messages of its own");
  bad = good, bad.vocabulary_parts = -2;
  refused(bad, {}, "-2 parts of the output layer");
  refused(Schedule{"none", 0, 0, {}}, {}, "0 ranks");
  SimulationCosts costs;
  costs.stages.clear();
  refused(good, costs, "times of 0 stages; legal: of 2, or one entry for all");
  costs.stages.resize(3);
  refused(good, costs, "times of 3 stages");
}

TEST(Simulate, TimesBelowZeroAndWithoutEndAreRefused) {
  const auto refused = [](const auto& change, const char* words) {
    SimulationCosts costs;
    change(costs);
    checks::expect_refusal([&] { simulate(one_f_one_b(2, 3), costs); }, {words});
  };
  refused([](SimulationCosts& c) { c.stages[0].backward_weight = -1; }, "time of W -1; legal: 0 or more");
  refused([](SimulationCosts& c) { c.message = std::nan(""); }, "time of a message nan");
  refused([](SimulationCosts& c) { c.stages[0].forward = HUGE_VAL; }, "time of F inf");
}

// F took 2 and BW 5 by themselves. Side by side they took 6 together instead of 7.
TEST(MeasuredCosts, PairsThatRanSideBySideHaveAFactor) {
  const auto span = [](Op op, int stage, double begin, double end) {
    Instruction i;
    i.op = op;
    i.stage = stage;
    return Span{i, begin, end};
  };
  const Timeline timeline{{{span(Op::F, 0, 0, 2), span(Op::send, 0, 2, 2.5), span(Op::F, 0, 3, 8.5),
                            span(Op::BW, 0, 3, 9), span(Op::BW, 0, 9, 14)}}};
  const SimulationCosts costs = measured_costs(timeline);
  EXPECT_DOUBLE_EQ(costs.of(0).forward, 2);
  EXPECT_DOUBLE_EQ(costs.of(0).backward_input + costs.of(0).backward_weight, 5);
  EXPECT_DOUBLE_EQ(costs.overlap_factor, 6.0 / 7);
  // Never alone: half of a pair each, which is then all of its time.
  const SimulationCosts halves =
      measured_costs({{{span(Op::F, 0, 0, 5), span(Op::BW, 1, 0, 6), span(Op::F, 1, 6, 9)}}});
  EXPECT_DOUBLE_EQ(halves.of(0).forward, 3);
  EXPECT_DOUBLE_EQ(halves.of(1).backward_input + halves.of(1).backward_weight, 3);
  EXPECT_DOUBLE_EQ(halves.overlap_factor, 1);
  // One after the other nothing is gained.
  EXPECT_DOUBLE_EQ(measured_costs({{{span(Op::F, 0, 0, 2), span(Op::BW, 0, 2, 7)}}}).overlap_factor, 1);
}

}  // namespace
}  // namespace echelon::simulate_test
