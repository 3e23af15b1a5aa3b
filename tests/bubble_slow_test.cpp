// The pipeline's time against its twin: the schedule simulated with the times that its own instructions took.
// Where a stage costs much and a message little, they agree.
#include <gtest/gtest.h>

#include <mutex>

#include "mesh_runs.h"
#include "plan/cost.h"
#include "schedule/simulate.h"

namespace echelon::bubble_slow_test {
namespace {

using namespace checks;

ModelSpec large_stages() {
  ModelSpec m = odd_llama(false, 4, 8);
  m.name = "large-stages";
  m.hidden = 256;
  m.head_dim = 64;
  m.mlp_hidden = 688;
  m.vocab = 257;
  m.max_seq = 256;
  return m;
}

// Measured over simulated, of one step.
std::vector<double> ratios(const Plan& plan, int steps) {
  const auto pipeline = std::make_shared<PipelineLayout>(plan);
  std::vector<Timeline> timelines(static_cast<std::size_t>(steps));
  for (Timeline& t : timelines) t.ranks.resize(static_cast<std::size_t>(plan.mesh.size(Axis::pp)));
  std::mutex mutex;
  const auto epoch = std::chrono::steady_clock::now();
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1, {}, pipeline);
    for (int step = 0; step < steps; ++step) {
      trainer.step(step, random_samples(plan), steps - step);
      const std::lock_guard lock(mutex);
      timelines[static_cast<std::size_t>(step)].ranks[static_cast<std::size_t>(rank.coordinate(Axis::pp))] =
          trainer.last_run().spans_since(epoch);
    }
  });
  std::vector<double> result;
  for (const Timeline& t : timelines)
    result.push_back(t.makespan() /
                     simulated_twin(pipeline->programs(0), measured_costs(t), 1, 1).makespan());
  return result;
}

// On a machine that does other things besides, most steps are disturbed: the best of them says what holds.
TEST(Bubble, StepTimeIsThatOfTheScheduleWithTheTimesMeasured) {
  if (!have_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-v"}) {
    Plan plan;
    plan.model = large_stages();
    plan.mesh.set(Axis::pp, 2);
    plan.schedule = schedule;
    plan.global_batch = 6;
    plan.micro_batch = 1;
    plan.seq_len = 256;
    double best = std::numeric_limits<double>::infinity();
    for (double ratio : ratios(plan, 6)) best = std::min(best, std::abs(ratio - 1));
    EXPECT_LE(best, 0.1) << schedule;
  }
}

}  // namespace
}  // namespace echelon::bubble_slow_test
