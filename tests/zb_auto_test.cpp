#include "schedule/zb_auto.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "base/error.h"
#include "case_choice.h"
#include "schedule/schedules.h"
#include "schedule/validate.h"

namespace echelon::zb_auto_test {
namespace {

double local_span(const Timeline& timeline) {
  double most = 0;
  for (const auto& rank : timeline.ranks)
    if (!rank.empty()) most = std::max(most, rank.back().end - rank.front().begin);
  return most;
}

StageMemory memory_of(const AutoCosts& costs, int stage) {
  return costs.memory.size() == 1 ? costs.memory[0] : costs.memory[static_cast<std::size_t>(stage)];
}

bool keeps_limit(const Schedule& schedule, const AutoCosts& costs) {
  for (int r = 0; r < schedule.num_ranks(); ++r) {
    const double limit =
        costs.limit.empty() ? 1e300 : costs.limit[costs.limit.size() == 1 ? 0 : static_cast<std::size_t>(r)];
    double held = 0;
    for (const Instruction& i : schedule.ranks[static_cast<std::size_t>(r)]) {
      const StageMemory m = memory_of(costs, i.stage);
      const double adds = i.op == Op::F   ? m.forward
                          : i.op == Op::B ? m.backward_input
                          : i.op == Op::W ? m.backward_weight
                                          : 0;
      // BW: both, one after the other.
      if (i.op == Op::BW && held + std::max(0.0, m.backward_input) > limit + 1e-6) return false;
      held += i.op == Op::BW ? m.backward_input + m.backward_weight : adds;
      if (adds > 0 && held > limit + 1e-6) return false;
    }
  }
  return true;
}

// What a result promises, against the simulator.
void check_result(const AutoResult& result, const AutoCosts& costs) {
  validate(result.schedule);
  const Simulation simulation = simulate(result.schedule, costs.times);
  EXPECT_NEAR(local_span(simulation.timeline), result.span, 1e-9 * result.span);
  EXPECT_NEAR(simulation.timeline.makespan(), result.makespan, 1e-9 * result.makespan);
  EXPECT_LE(result.lower_bound, result.span);
  EXPECT_LE(result.makespan_lower_bound, result.makespan);
  EXPECT_TRUE(keeps_limit(result.schedule, costs));
  if (result.optimal) {
    EXPECT_NEAR(result.lower_bound, result.span, 1e-8 * result.span);
  }
}

AutoCosts even(double limit, double message = 0) {
  AutoCosts costs;
  costs.times.stages = {{10, 10, 10}};
  costs.times.message = message;
  costs.limit = {limit};
  return costs;
}

AutoCosts random_costs(std::mt19937& random, int ranks, int microbatches) {
  const auto number = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  AutoCosts costs;
  costs.times.stages.clear();
  costs.memory.clear();
  const int kind = number(0, 3);
  for (int r = 0; r < ranks; ++r) {
    costs.times.stages.push_back({1.0 * number(1, 9), 1.0 * number(1, 9), 1.0 * number(1, 9)});
    const double backward = kind < 2 ? 0 : kind == 2 ? -0.25 * number(0, 4) : 0.25 * number(-3, 3);
    costs.memory.push_back({1, backward, -1 - backward});
    costs.limit.push_back(0.25 * number(8, 8 + 4 * microbatches));
  }
  costs.times.message = number(0, 1) * number(1, 6);
  return costs;
}

TEST(ZbAuto, PublishedValues) {
  const struct {
    int ranks, microbatches;
    double limit, span;
  } values[] = {{4, 12, 4, 390}, {4, 12, 6, 370},  {4, 12, 8, 360},
                {8, 24, 8, 790}, {8, 24, 12, 750}, {8, 24, 16, 720}};
  for (const auto& v : values) {
    const AutoResult result = zb_auto(v.ranks, v.microbatches, even(v.limit));
    SCOPED_TRACE(v.span);
    check_result(result, even(v.limit));
    EXPECT_LE(result.span, v.span);
    EXPECT_TRUE(result.optimal);
  }
}

TEST(ZbAuto, NeverWorseThanThePublishedSchedules) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 12; ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 5), microbatches = 1 + static_cast<int>(random() % 12);
    const AutoCosts costs = random_costs(random, ranks, microbatches);
    if (!checks::is_taken(3)) continue;
    const AutoResult result = zb_auto(ranks, microbatches, costs);
    SCOPED_TRACE(trial);
    check_result(result, costs);
    for (const char* name : {"naive", "gpipe", "1f1b", "zb-h1", "zb-h2"}) {
      Schedule other;
      try {
        other = make_schedule(name, ranks, microbatches);
      } catch (const RequestError&) {
        continue;  // too few microbatches
      }
      if (!keeps_limit(other, costs)) continue;
      const Simulation simulation = simulate(other, costs.times);
      EXPECT_GE(local_span(simulation.timeline), result.lower_bound * (1 - 1e-9)) << name;
      EXPECT_GE(simulation.timeline.makespan(), result.makespan_lower_bound * (1 - 1e-9)) << name;
      if (name[0] == '1' || name[0] == 'z') {
        EXPECT_LE(result.span, local_span(simulation.timeline) * (1 + 1e-9)) << name;
      }
    }
  }
}

// All strings of F, B, W of one rank; with `any_order`, microbatches in any order too.
void all_lists(int stage, int microbatches, bool any_order, std::vector<Instruction>& list,
               std::vector<int>& done, std::vector<std::vector<Instruction>>& lists) {
  if (list.size() == static_cast<std::size_t>(3 * microbatches)) lists.push_back(list);
  std::vector<bool> tried(3, false);
  for (int m = 0; m < microbatches; ++m) {
    int& count = done[static_cast<std::size_t>(m)];
    if (count == 3 || (!any_order && tried[static_cast<std::size_t>(count)])) continue;
    tried[static_cast<std::size_t>(count)] = true;
    list.push_back({count == 0 ? Op::F : count == 1 ? Op::B : Op::W, stage, m});
    ++count;
    all_lists(stage, microbatches, any_order, list, done, lists);
    --count;
    list.pop_back();
  }
}

// Every order of every rank.
void against_brute_force(int ranks, int microbatches, bool any_order, int trials, unsigned seed) {
  std::mt19937 random(seed);
  for (int trial = 0; trial < trials; ++trial) {
    AutoCosts costs = random_costs(random, ranks, microbatches);
    for (double& limit : costs.limit) limit = std::max(1.75, limit - 1);
    const AutoResult result = zb_auto(ranks, microbatches, costs);
    check_result(result, costs);
    std::vector<std::vector<std::vector<Instruction>>> lists(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      std::vector<Instruction> list;
      std::vector<int> done(static_cast<std::size_t>(microbatches), 0);
      all_lists(r, microbatches, any_order, list, done, lists[static_cast<std::size_t>(r)]);
    }
    double least_span = 1e300, least_makespan = 1e300,
           least_of_span = 1e300;  // the last: with the least span
    std::vector<std::size_t> at(static_cast<std::size_t>(ranks), 0);
    for (bool more = true; more;) {
      Schedule schedule{"brute force", ranks, microbatches, {}};
      for (std::size_t r = 0; r < at.size(); ++r) schedule.ranks.push_back(lists[r][at[r]]);
      if (keeps_limit(schedule, costs)) try {
          const Simulation simulation = simulate(schedule, costs.times);
          const double span = local_span(simulation.timeline), makespan = simulation.timeline.makespan();
          if (span < least_span - 1e-9) least_of_span = makespan;
          if (span < least_span + 1e-9) least_of_span = std::min(least_of_span, makespan);
          least_span = std::min(least_span, span);
          least_makespan = std::min(least_makespan, makespan);
        } catch (const RequestError&) {  // dead-locks
        }
      more = false;
      for (std::size_t r = 0; r < at.size() && !more; ++r) {
        at[r] = (at[r] + 1) % lists[r].size();
        more = at[r] != 0;
      }
    }
    SCOPED_TRACE(testing::Message() << "ranks " << ranks << " microbatches " << microbatches << " trial "
                                    << trial);
    EXPECT_TRUE(result.optimal);
    EXPECT_NEAR(result.span, least_span, 1e-6);
    EXPECT_TRUE(result.makespan_optimal);
    EXPECT_NEAR(result.makespan, least_of_span, 1e-6);
    EXPECT_LE(result.makespan_lower_bound, least_makespan + 1e-6);
  }
}

TEST(ZbAuto, BruteForceInOrder) {  // long
  against_brute_force(2, 2, false, 60, 1);
  against_brute_force(3, 2, false, 60, 2);
  against_brute_force(2, 3, false, 30, 3);
  against_brute_force(4, 2, false, 12, 4);
}
TEST(ZbAuto, BruteForceAnyOrder) {
  against_brute_force(2, 2, true, 30, 5);
  against_brute_force(3, 2, true, 6, 6);
}

// Its first order of the least span is not the shortest.
TEST(ZbAuto, LeastMakespanOfTheLeastSpan) {
  AutoCosts costs;
  costs.times.stages = {{2, 2, 1}, {1.5, 2, 2}, {1, 2, 1}};
  costs.limit = {2, 4, 2};
  const AutoResult result = zb_auto(3, 3, costs);
  check_result(result, costs);
  EXPECT_TRUE(result.optimal);
  EXPECT_TRUE(result.makespan_optimal);
  EXPECT_EQ(result.makespan, 23);
}

// On a random rank any instruction whose inputs are there and that the limit has room for, until all have
// run.
Schedule random_order(std::mt19937& random, int ranks, int microbatches, const AutoCosts& costs) {
  Schedule schedule{"random", ranks, microbatches, {}};
  schedule.ranks.resize(static_cast<std::size_t>(ranks));
  std::vector<std::array<int, 3>> done(static_cast<std::size_t>(ranks));
  std::vector<double> held(static_cast<std::size_t>(ranks));
  struct Choice {
    std::size_t rank;
    int op;
    double adds;
  };
  for (int step = 0; step < 3 * ranks * microbatches; ++step) {
    std::vector<Choice> can;
    for (std::size_t r = 0; r < done.size(); ++r) {
      const StageMemory m = memory_of(costs, static_cast<int>(r));
      const double room = costs.limit[r] + 1e-9 - held[r];
      const int forwards = r == 0 ? microbatches : done[r - 1][0];
      const int backwards = r + 1 == done.size() ? done[r][0] : std::min(done[r][0], done[r + 1][1]);
      // The B of every microbatch in flight must fit too.
      const double last = std::max(0.0, m.backward_input);
      if (done[r][0] < forwards && m.forward + last <= room) can.push_back({r, 0, m.forward});
      if (done[r][1] < backwards && m.backward_input <= room) can.push_back({r, 1, m.backward_input});
      if (done[r][2] < done[r][1]) can.push_back({r, 2, m.backward_weight});
    }
    if (can.empty()) return {};
    const Choice c = can[random() % can.size()];
    schedule.ranks[c.rank].push_back({c.op == 0   ? Op::F
                                      : c.op == 1 ? Op::B
                                                  : Op::W,
                                      static_cast<int>(c.rank), done[c.rank][c.op]++});
    held[c.rank] += c.adds;
  }
  return schedule;
}

TEST(ZbAuto, NoOrderBeatsTheBound) {  // long
  std::mt19937 random(17);
  int finished = 0;
  for (int trial = 0; trial < 12; ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 6), microbatches = 2 + static_cast<int>(random() % 15);
    const AutoCosts costs = random_costs(random, ranks, microbatches);
    const AutoResult result = zb_auto(ranks, microbatches, costs);
    check_result(result, costs);
    for (int order = 0; order < 100; ++order) {
      const Schedule schedule = random_order(random, ranks, microbatches, costs);
      if (schedule.ranks.empty()) continue;
      const Timeline timeline = simulate(schedule, costs.times).timeline;
      ++finished;
      ASSERT_GE(local_span(timeline), result.lower_bound * (1 - 1e-9)) << trial;
      ASSERT_GE(timeline.makespan(), result.makespan_lower_bound * (1 - 1e-9)) << trial;
    }
    // Under a tighter limit the same bound holds.
    AutoCosts tight = costs;
    for (double& limit : tight.limit) limit = std::max(1.75, 0.6 * limit);
    ASSERT_GE(zb_auto(ranks, microbatches, tight).span, result.lower_bound * (1 - 1e-9)) << trial;
  }
  EXPECT_GE(finished, 1000);
}

// Every rank of a run searches alone.
TEST(ZbAuto, FindsTheSameAgain) {  // long
  std::mt19937 random(5);
  for (auto [ranks, microbatches] : {std::pair{3, 5}, {6, 17}, {12, 40}}) {
    const AutoCosts costs = random_costs(random, ranks, microbatches);
    const AutoResult once = zb_auto(ranks, microbatches, costs), again = zb_auto(ranks, microbatches, costs);
    EXPECT_EQ(once.schedule.ranks, again.schedule.ranks);
    EXPECT_EQ(once.lower_bound, again.lower_bound);
  }
}

TEST(ZbAuto, SmallCasesAreExact) {  // long
  int proven = 0;
  std::mt19937 random(11);
  for (int trial = 0; trial < 8; ++trial) {
    const AutoCosts costs = random_costs(random, 4, 6);
    const AutoResult result = zb_auto(4, 6, costs);
    check_result(result, costs);
    proven += result.optimal;
  }
  RecordProperty("proven_of_8", proven);
  EXPECT_GE(proven, 6);
}

TEST(ZbAuto, LargeCasesComeNearTheBound) {  // long
  AutoCosts costs;
  std::mt19937 random(3);
  const auto number = [&](int low, int high) {
    return 1.0 * std::uniform_int_distribution<int>(low, high)(random);
  };
  costs.times.stages.clear();
  for (int r = 0; r < 32; ++r) costs.times.stages.push_back({number(9, 12), number(9, 13), number(7, 10)});
  costs.times.message = 1;
  costs.limit = {48};
  AutoResult result = zb_auto(32, 128, costs);
  check_result(result, costs);
  EXPECT_LE(result.span, 1.02 * result.lower_bound);
  if (!checks::takes_wide_cases()) return;
  // Half of what 1f1b holds, and too many microbatches to try everything with all of them.
  costs = even(32);
  result = zb_auto(64, 512, costs);
  check_result(result, costs);
  EXPECT_LE(result.span, 1.04 * result.lower_bound);
}

TEST(ZbAuto, Edges) {
  for (int ranks : {1, 2, 5})
    for (int microbatches : {1, 2, 7}) {
      AutoCosts costs;  // no limit
      check_result(zb_auto(ranks, microbatches, costs), costs);
      costs.limit = {1};
      check_result(zb_auto(ranks, microbatches, costs), costs);
      costs.times.stages = {{1, 1, 0}};  // nothing to train
      check_result(zb_auto(ranks, microbatches, costs), costs);
    }
}

// Memory in any unit: the same order.
TEST(ZbAuto, DoesNotDependOnTheUnitOfMemory) {  // long
  for (const double limit : {1.0, 2.0, 3.5, 6.0}) {
    const AutoResult expected = zb_auto(4, 8, even(limit));
    for (const double unit : {1e-12, 1e-3, 1e10}) {
      AutoCosts costs = even(limit * unit);
      costs.memory = {{unit, 0, -unit}};
      const AutoResult found = zb_auto(4, 8, costs);
      EXPECT_EQ(found.schedule.ranks, expected.schedule.ranks) << limit << " " << unit;
      for (double peak : found.peak_memory) EXPECT_LE(peak, limit * unit * (1 + 1e-8));
    }
  }
}

TEST(ZbAuto, Refuses) {
  EXPECT_THROW(zb_auto(4, 8, even(0.5)), RequestError);
  AutoCosts costs = even(1);
  EXPECT_NO_THROW(zb_auto(4, 8, costs));
  costs.memory = {{1, 0.5, -1.5}};  // B needs more beside the activation
  EXPECT_THROW(zb_auto(4, 8, costs), RequestError);
  costs.memory = {{1, 0, -0.5}};  // leaks
  EXPECT_THROW(zb_auto(4, 8, costs), RequestError);
  costs = even(4);
  costs.limit = {4, 4};  // for 4 ranks
  EXPECT_THROW(zb_auto(4, 8, costs), RequestError);
  EXPECT_THROW(zb_auto(0, 8, even(4)), RequestError);
  EXPECT_THROW(zb_auto(4, 0, even(4)), RequestError);
}

}  // namespace
}  // namespace echelon::zb_auto_test
