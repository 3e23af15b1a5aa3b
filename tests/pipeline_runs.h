// What the tests of pipelines share: plans, and what every schedule is held to.
#pragma once

#include <string>
#include <vector>

#include "case_choice.h"
#include "mesh_runs.h"
#include "schedule/schedules.h"
#include "verify/verify.h"

namespace echelon::checks {

inline std::vector<std::string> flushing_schedules() {
  std::vector<std::string> names;
  for (const std::string& name : schedule_names())
    if (name != "pipedream" && name != "2bw") names.push_back(name);
  return names;
}

inline Plan pipeline_plan(const ModelSpec& model, const std::string& schedule, int pp, int dp, int tp,
                          std::int64_t microbatches) {
  Plan plan = odd_plan(model, dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.schedule = schedule;
  plan.micro_batch = 1;
  plan.global_batch = microbatches * dp;
  plan.seq_len = 5;
  return plan;
}

inline VerifyRequest verify_request(const Plan& plan, std::int64_t steps = 1, double clip = 0.1) {
  VerifyRequest request;
  request.plan = plan;
  request.optimizer.warmup_steps = 0;
  request.optimizer.clip = clip;
  request.run.timeout = patience;
  request.steps = steps;
  return request;
}
inline VerifyReport verified(const Plan& plan, std::int64_t steps = 1) {
  return verify(verify_request(plan, steps));
}

// DualPipe adds the gradients of its two directions at the end: another grouping.
inline bool keeps_grouping(const std::string& schedule) { return schedule != "dualpipe"; }

inline void expect_bits_of_one_rank(const Plan& plan) {
  if (!is_taken()) return;
  SCOPED_TRACE(fmt::format("{} pp {}, {} microbatches, {}", plan.schedule, plan.mesh.size(Axis::pp),
                           plan.global_batch, describe(plan)));
  const VerifyReport report = verified(plan);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  EXPECT_TRUE(report.bitwise || !keeps_grouping(plan.schedule)) << to_json(report, plan);
}

inline void expect_passes(const Plan& plan) {
  if (!is_taken()) return;
  SCOPED_TRACE(fmt::format("{} {}", plan.schedule, describe(plan)));
  const VerifyReport report = verified(plan);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  EXPECT_LE(report.grad_max_rel_diff, 1e-10);
}

// PipeDream and 2BW against a one-rank emulation of their delay, as one stream of so many steps. Where no sum
// is regrouped, the same bits; the loss is a mean of updates there and of targets here.
inline void expect_emulation(const Plan& plan, std::int64_t steps) {
  if (!is_taken()) return;
  VerifyRequest request = verify_request(plan, steps, 0);
  request.optimizer.eps = 1e-5;
  const VerifyReport report = verify(request);
  SCOPED_TRACE(fmt::format("{} {}", plan.schedule, describe(plan)));
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  if (plan.mesh.size(Axis::dp) * plan.mesh.size(Axis::tp) == 1) {
    EXPECT_EQ(report.grad_max_rel_diff, 0);
    EXPECT_EQ(report.param_max_rel_diff, 0);
  }
  EXPECT_LE(report.grad_max_rel_diff, 1e-10);
}

// DualPipe's directions have at least four microbatches together, and two equal halves of an even number of
// ranks.
inline bool has_microbatches(const std::string& schedule, int microbatches) {
  if (!schedule.starts_with("dualpipe")) return true;
  return microbatches >= 4 && (schedule != "dualpipe" || microbatches % 2 == 0);
}

struct StepRun {
  std::vector<StepResult> results;     // of rank 0
  std::vector<LogicalTensors> states;  // values and moments, by rank
};

// Eight steps by Trainer::step(), with a pause (an evaluation, a checkpoint) after the fifth.
inline StepRun run_on(const Plan& plan, double clip) {
  StepRun run;
  run.states.resize(static_cast<std::size_t>(plan.mesh.num_ranks()));
  OptimizerOptions options;
  options.clip = clip;
  options.warmup_steps = 0;
  options.lr = 1e-2;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, options, 1);
    for (int step = 0; step < 8; ++step)
      for (const StepResult& r : trainer.step(step, random_samples(plan), step < 5 ? 5 - step : 8 - step))
        if (rank.index() == 0) run.results.push_back(r);
    auto& state = run.states[static_cast<std::size_t>(rank.index())];
    for (ParameterTensor which :
         {ParameterTensor::value, ParameterTensor::exp_avg, ParameterTensor::exp_avg_sq})
      for (auto& [name, values] : gather(rank, trainer, which))
        state[fmt::format("{} {}", name, static_cast<int>(which))] = values;
  });
  return run;
}

// The optimizer without its barrier has the bits that it has with it, whether guesses are right, wrong, or
// now this and now that. Counts both.
struct Guesses {
  int right = 0, wrong = 0;
};
inline void expect_bits_without_barrier(const Plan& plan, Guesses& guesses) {
  Plan without = plan;
  without.optimizer_barrier = false;
  const double clip = run_on(plan, 0).results.at(4).gradient_norm;  // above and below it
  SCOPED_TRACE(fmt::format("{} pp {} {}", plan.schedule, plan.mesh.size(Axis::pp), describe(plan)));
  const StepRun expected = run_on(plan, clip), run = run_on(without, clip);
  ASSERT_EQ(run.results.size(), 8u);
  for (std::size_t step = 0; step < 8; ++step) {
    EXPECT_EQ(run.results[step].step, expected.results[step].step);
    EXPECT_EQ(run.results[step].loss, expected.results[step].loss);
    EXPECT_EQ(run.results[step].gradient_norm, expected.results[step].gradient_norm);
    EXPECT_TRUE(!run.results[step].taken_back || run.results[step].gradient_norm > clip);
    (run.results[step].taken_back ? guesses.wrong : guesses.right) += 1;
  }
  EXPECT_EQ(run.states, expected.states);
}

}  // namespace echelon::checks
