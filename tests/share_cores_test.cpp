// Schedules on fewer cores than threads, on paper.
#include "schedule/share_cores.h"

#include <gtest/gtest.h>

#include "schedule/schedules.h"

namespace echelon::share_cores_test {
namespace {

SimulationCosts uneven(int stages) {
  SimulationCosts costs;
  costs.stages.clear();
  for (int s = 0; s < stages; ++s) costs.stages.push_back({1.0 + 0.3 * s, 1.5 - 0.1 * s, 0.75});
  return costs;
}

double work_of(const Schedule& schedule, const SimulationCosts& costs) {
  double work = 0;
  for (const auto& list : schedule.ranks)
    for (const Instruction& i : list) {
      const StageTimes& t = costs.of(i.stage);
      if (i.op == Op::F) work += t.forward;
      if (i.op == Op::B || i.op == Op::BW) work += t.backward_input;
      if (i.op == Op::W || i.op == Op::BW) work += t.backward_weight;
    }
  return work;
}

// Without Op overlaps: what runs together is counted apart by simulate().
const std::vector<std::string>& plain() {
  static const std::vector<std::string> names{"naive", "gpipe", "1f1b",     "interleaved",
                                              "zb-h1", "zb-v",  "pipedream"};
  return names;
}

TEST(ShareCores, WithCoresForAllItIsTheSimulation) {
  for (const std::string& name : plain())
    for (double message : {0.0, 0.4}) {
      const Schedule schedule = make_schedule(name, 4, 8, 0, name == "pipedream" ? 3 : 1);
      SimulationCosts costs = uneven(schedule.num_stages);
      costs.message = message;
      SCOPED_TRACE(name);
      const Timeline expected = simulate(schedule, costs).timeline,
                     shared = simulate_on_cores(schedule, costs, {8, 2});
      for (std::size_t r = 0; r < 4; ++r) {
        ASSERT_EQ(shared.ranks[r].size(), expected.ranks[r].size());
        for (std::size_t k = 0; k < shared.ranks[r].size(); ++k) {
          // Messages of one pair follow one another there; here each takes its own time.
          if (message > 0) continue;
          EXPECT_NEAR(shared.ranks[r][k].begin, expected.ranks[r][k].begin, 1e-9);
          EXPECT_NEAR(shared.ranks[r][k].end, expected.ranks[r][k].end, 1e-9);
        }
      }
      EXPECT_LE(shared.makespan(), expected.makespan() + 1e-9);
    }
}

TEST(ShareCores, NoCoreIsIdleWhileThereIsWork) {
  for (const std::string& name : schedule_names()) {
    if (name == "zb-auto") continue;
    SCOPED_TRACE(name);
    const Schedule schedule = make_schedule(name, 4, 8);
    const SimulationCosts costs = uneven(schedule.num_stages);
    const double work = work_of(schedule, costs),
                 alone = simulate_on_cores(schedule, costs, {100, 1}).makespan();
    // One rank's threads at a time; two such ranks on one core take twice as long.
    EXPECT_NEAR(simulate_on_cores(schedule, costs, {1, 1}).makespan(), work, 1e-9 * work);
    EXPECT_NEAR(simulate_on_cores(schedule, costs, {1, 2}).makespan(), 2 * work, 1e-9 * work);
    // Four ranks beside each of the schedule's: two cores are busy whoever waits.
    EXPECT_NEAR(simulate_on_cores(schedule, costs, {2, 4}).makespan(), 2 * work, 1e-9 * work);
    for (double cores : {1.5, 2.0, 3.0}) {
      const double makespan = simulate_on_cores(schedule, costs, {cores, 1}).makespan();
      EXPECT_GE(makespan, std::max(alone, work / cores) - 1e-9);
      EXPECT_LE(makespan, alone + work / cores + 1e-9);  // Graham
    }
  }
}

}  // namespace
}  // namespace echelon::share_cores_test
