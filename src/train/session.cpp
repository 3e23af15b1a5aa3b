#include "train/session.h"

#include <algorithm>
#include <map>
#include <memory>

#include "base/error.h"
#include "plan/cost.h"
#include "plan/memory.h"
#include "plan/traffic.h"
#include "schedule/simulate.h"
#include "train/rank_run.h"
#include "train/refuse_request.h"
#include "train/server_run.h"

namespace echelon {
namespace {

Memory predicted_memory(const SharedRun& run) {
  const Plan& plan = run.request.plan;
  Memory memory = predict_memory(plan, *run.pipeline);
  memory[MemoryCategory::other] = kernel_scratch_bytes(plan.dtype, run.request.run.threads_per_rank);
  if (run.request.asynchronous) memory[MemoryCategory::optimizer] = 0;  // the servers have it
  return memory;
}

// All but what predict_step() says.
StartInfo start_info(const SharedRun& run, int workers) {
  StartInfo start;
  start.train_tokens = run.split.train.size();
  start.validation_tokens = run.split.validation.size();
  start.num_files = run.data.num_files();
  start.num_params = num_parameters(run.request.plan.model);
  start.first_step = run.resumed.step;
  start.resumed_from = run.resumed.path;
  start.predicted_memory = predicted_memory(run);
  start.peak_flops = measure_matmul_flops(run.request.plan.dtype, workers);
  const StepPrograms& programs = run.pipeline->programs(0);
  if (!programs.flushes()) start.staleness = staleness(programs.schedule());
  return start;
}

// Of the last step; where the schedule does not flush, of a stream's steps on average. As it is measured.
Traffic predicted_traffic(const SharedRun& run) {
  const Plan& plan = run.request.plan;
  if (run.request.asynchronous) return predict_worker_traffic(plan, *run.pipeline, *run.request.asynchronous);
  const StepPrograms& programs = run.pipeline->programs(0);
  const std::int64_t steps = run.request.optimizer.total_steps - run.start.first_step;
  std::map<std::int64_t, Traffic> by_uncompressed_updates;
  const auto of = [&](std::int64_t step) -> const Traffic& {
    const std::int64_t updates = run.resumed.updates + step * programs.updates_per_step();
    const std::int64_t uncompressed =
        std::clamp<std::int64_t>(plan.compression.warmup_steps - updates, 0, programs.updates_per_step());
    const auto [found, fresh] = by_uncompressed_updates.try_emplace(uncompressed);
    if (fresh) found->second = predict_traffic(plan, *run.pipeline, {}, updates);
    return found->second;
  };
  if (programs.flushes()) return of(steps - 1);
  Traffic sum;
  for (std::int64_t step = 0; step < steps; ++step) sum += of(step);
  return sum / steps;
}

// By a straggler. Where all wait for it, it sleeps in proportion to what it computes in a step.
double predicted_slowdown(const SharedRun& run, const StepPrediction& step) {
  const TrainRequest& request = run.request;
  if (!request.straggler) return 1;
  const double factor = request.straggler->factor;
  if (!request.asynchronous) return 1 + (factor - 1) * (1 - step.bubble_fraction);
  return straggler_slowdown(factor, request.plan.mesh.size(Axis::dp),
                            request.optimizer.total_steps - run.start.first_step, *request.asynchronous);
}

// What is known before the first step.
TrainSummary start_summary(const SharedRun& run) {
  const Plan& plan = run.request.plan;
  TrainSummary summary;
  summary.ranks = num_ranks(plan, run.request.asynchronous);
  summary.num_params = run.start.num_params;
  summary.predicted_memory = run.start.predicted_memory;
  summary.predicted_traffic = predicted_traffic(run);
  summary.predicted_step_seconds = run.start.predicted_step_seconds;
  if (const auto& options = run.request.asynchronous)
    summary.asynchronous.emplace().predicted_memory = predict_server_memory(plan, *run.pipeline, *options, 0);
  summary.measured_timeline.ranks.resize(static_cast<std::size_t>(plan.mesh.size(Axis::pp)));
  summary.predicted_staleness = run.start.staleness;
  summary.measured_staleness.resize(run.start.staleness.size());
  return summary;
}

void run_rank(const SharedRun& run, ThreadWorld& world, int index, TrainSummary& summary) {
  const Plan& plan = run.request.plan;
  const Collectives collectives = run.request.run.collectives;
  const int workers = plan.mesh.num_ranks();
  Arena arena;
  const auto kernels = make_kernels(arena, plan.dtype, run.request.run.threads_per_rank);
  if (index >= workers) {
    const Rank rank(world, server_plan(plan, run.request.asynchronous->servers).mesh, index - workers,
                    plan.dtype, arena, *kernels, collectives, workers);
    return ServerRun(run, rank, summary).run();
  }
  const Rank rank(world, plan.mesh, index, plan.dtype, arena, *kernels, collectives);
  RankRun(run, rank, summary).run();
}

void compare_timelines(const StepPrograms& programs, TrainSummary& summary) {
  if (summary.measured_timeline.ranks.front().empty()) return;  // other workers took all batches
  summary.measured_bubble = summary.measured_timeline.bubble_fraction();
  summary.simulated_timeline = simulated_twin(programs, measured_costs(summary.measured_timeline),
                                              summary.steps, programs.shown_steps());
}

}  // namespace

TrainSummary train(const TrainRequest& request, const TokenData& data, const TrainObserver& observer) {
  const Plan& plan = request.plan;
  validate(plan);
  const auto pipeline = std::make_shared<PipelineLayout>(plan);
  refuse_impossible(request, *pipeline);
  SharedRun run{request,
                data,
                split_tokens(data.size(), request.validation_fraction, plan.seq_len),
                find_resumed(request),
                {},
                observer,
                pipeline};
  refuse_what_machine_lacks(request, *pipeline);
  const int workers = std::min(available_cores(), plan.mesh.num_ranks() * request.run.threads_per_rank);
  run.start = start_info(run, workers);
  const double rank_share = std::min(1.0, static_cast<double>(request.run.threads_per_rank) / workers);
  const StepPrediction predicted =
      predict_step(plan, *pipeline, {run.start.peak_flops, run.start.peak_flops * rank_share});
  run.start.predicted_step_seconds = predicted.seconds * predicted_slowdown(run, predicted);
  RunOutputs outputs(request);
  if (!request.resume) outputs.start_log_anew();
  run.outputs = &outputs;
  if (observer.on_start) observer.on_start(run.start);

  TrainSummary summary = start_summary(run);
  summary.predicted_bubble = predicted.bubble_fraction;
  ThreadWorld world(summary.ranks, request.run.timeout);
  try {
    run_ranks(world, [&](int index) { run_rank(run, world, index, summary); });
  } catch (const RequestError&) {  // a checkpoint that is damaged inside
    outputs.remove_new_log();
    throw;
  }
  compare_timelines(pipeline->programs(0), summary);
  return summary;
}

}  // namespace echelon
