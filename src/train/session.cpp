#include "train/session.h"

#include <algorithm>
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

// What is known before the first step.
TrainSummary start_summary(const SharedRun& run) {
  const Plan& plan = run.request.plan;
  const auto& asynchronous = run.request.asynchronous;
  TrainSummary summary;
  summary.ranks = num_ranks(plan, asynchronous);
  summary.num_params = run.start.num_params;
  summary.predicted_memory = run.start.predicted_memory;
  summary.predicted_traffic = asynchronous ? predict_worker_traffic(plan, *run.pipeline, *asynchronous)
                                           : predict_traffic(plan, *run.pipeline);
  summary.predicted_step_seconds = run.start.predicted_step_seconds;
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
  refuse_what_machine_lacks(request);
  const int workers = std::min(available_cores(), plan.mesh.num_ranks() * request.run.threads_per_rank);
  run.start = start_info(run, workers);
  const double rank_share = std::min(1.0, static_cast<double>(request.run.threads_per_rank) / workers);
  const StepPrediction predicted =
      predict_step(plan, *pipeline, {run.start.peak_flops, run.start.peak_flops * rank_share});
  run.start.predicted_step_seconds = predicted.seconds;
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
