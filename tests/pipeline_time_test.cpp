// The pipeline's time against its twin: what the executor takes on clocks that only sleep turns is what
// simulate() says of the schedule, and what the simulation says again of the times that it measured.
#include <gtest/gtest.h>

#include "overlap_runs.h"
#include "pipeline_runs.h"
#include "plan/cost.h"

namespace echelon::pipeline_time_test {
namespace {

using namespace checks;

// Every stage takes times of its own.
SimulationCosts uneven_costs(int num_stages, double message) {
  SimulationCosts costs;
  costs.stages.clear();
  for (int stage = 0; stage < num_stages; ++stage)
    costs.stages.push_back(
        {0.004 + 0.001 * (stage % 3), 0.005 + 0.001 * (stage % 2), 0.002 + 0.001 * (stage % 2)});
  costs.message = message;
  return costs;
}

TEST(PipelineTime, IsThatOfTheScheduleSimulated) {
  constexpr int ranks = 4, microbatches = 8;
  for (const std::string& name : flushing_schedules()) {
    const StepPrograms programs(make_schedule(name, ranks, microbatches, name == "interleaved" ? 2 : 0));
    for (double message : {0.0, 0.002}) {
      SCOPED_TRACE(fmt::format("{}, messages of {} s", name, message));
      const SimulationCosts costs = uneven_costs(programs.schedule().num_stages, message);
      const double simulated = simulated_twin(programs, costs, 1, 1).makespan();
      const auto makespan = [&](bool together) {
        return run_asleep(programs, ranks, costs, {}, together, time_of_each_thread()).timeline.makespan();
      };
      // The passes of DualPipe's pairs one after the other: what one of them sends leaves before both are
      // done.
      EXPECT_LE(makespan(false), simulated + 1e-9);
      if (message == 0 || !name.starts_with("dualpipe")) {
        EXPECT_NEAR(makespan(true), simulated, 1e-9);
      }
    }
  }
}

// The twin of a run is simulated with the times that its own instructions took.
TEST(PipelineTime, IsThatOfItsOwnInstructions) {
  constexpr int ranks = 4, microbatches = 8;
  for (const std::string& name : flushing_schedules()) {
    SCOPED_TRACE(name);
    const StepPrograms programs(make_schedule(name, ranks, microbatches, name == "interleaved" ? 2 : 0));
    const SimulationCosts costs = uneven_costs(programs.schedule().num_stages, 0);
    const SleepingRun run = run_asleep(programs, ranks, costs, {}, true, time_of_each_thread());
    EXPECT_NEAR(run.timeline.makespan(),
                simulated_twin(programs, measured_costs(run.timeline), 1, 1).makespan(), 1e-9);
  }
}

}  // namespace
}  // namespace echelon::pipeline_time_test
