#include "train/session.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "base/error.h"
#include "plan/cost.h"
#include "plan/memory.h"
#include "plan/traffic.h"
#include "schedule/simulate.h"
#include "train/checkpoint_writer.h"
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

// Compute threads of the whole job, as far as cores go round, and what they reach together.
struct ComputePower {
  int threads = 1;
  double flops = 0;  // per second
};
ComputePower measure_power(const Plan& plan, const RunOptions& options) {
  const int ranks = plan.mesh.num_ranks(), per_rank = options.threads_per_rank;
  if (options.processes == nullptr) {
    const int threads = std::min(available_cores(), ranks * per_rank);
    return {threads, measure_matmul_flops(plan.dtype, threads)};
  }
  // A process may be bound to fewer cores than it shares the machine with.
  const int on_node = options.processes->ranks_on_this_node();
  const int here = std::min(machine_cores(), on_node * per_rank), mine = std::min(here, available_cores());
  const int threads = std::max(1, here * ranks / on_node);
  return {threads, measure_matmul_flops(plan.dtype, mine) * threads / mine};
}

// All but what predict_step() says.
StartInfo start_info(const SharedRun& run, double peak_flops) {
  StartInfo start;
  start.train_tokens = run.split.train.size();
  start.validation_tokens = run.split.validation.size();
  start.num_files = run.data.num_files();
  start.num_params = num_parameters(run.request.plan.model);
  start.first_step = run.resumed.step;
  start.resumed_from = run.resumed.path;
  start.predicted_memory = predicted_memory(run);
  start.peak_flops = peak_flops;
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

void run_rank(const SharedRun& run, World& world, int index, TrainSummary& summary) {
  const Plan& plan = run.request.plan;
  const Collectives collectives = run.request.run.collectives;
  const int workers = plan.mesh.num_ranks();
  Arena arena(static_cast<std::size_t>(run.request.run.memory_limit));
  const auto kernels = make_kernels(arena, plan.dtype, run.request.run.threads_per_rank);
  if (index >= workers) {
    const Rank rank(world, server_plan(plan, run.request.asynchronous->servers).mesh, index - workers,
                    plan.dtype, arena, *kernels, collectives, workers);
    return ServerRun(run, rank, summary).run();
  }
  const Rank rank(world, plan.mesh, index, plan.dtype, arena, *kernels, collectives);
  TrainSummary unused;  // rank 0's alone is read
  RankRun(run, rank, index == 0 || run.request.asynchronous ? summary : unused).run();
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
  const RunOptions& options = request.run;
  std::optional<SharedRun> prepared;
  refuse_together(options.processes, [&] {
    validate(plan);
    const auto pipeline = std::make_shared<PipelineLayout>(plan);
    refuse_impossible(request, *pipeline);
    prepared.emplace(SharedRun{request,
                               data,
                               split_tokens(data.size(), request.validation_fraction, plan.seq_len),
                               find_resumed(request, data.kind()),
                               {},
                               observer,
                               pipeline});
    refuse_what_machine_lacks(request, *pipeline);
  });
  SharedRun& run = *prepared;
  std::optional<RunOutputs> outputs;
  TrainSummary summary;
  refuse_together(options.processes, [&] {
    if (!options.leads()) return;
    const ComputePower power = measure_power(plan, options);
    run.start = start_info(run, power.flops);
    const double rank_share = std::min(1.0, static_cast<double>(options.threads_per_rank) / power.threads);
    const StepPrediction predicted = request.priced_step.value_or(
        predict_step(plan, *run.pipeline, {run.start.peak_flops, run.start.peak_flops * rank_share}));
    run.start.predicted_step_seconds = predicted.seconds * predicted_slowdown(run, predicted);
    run.outputs = &outputs.emplace(request);
    if (!request.resume) outputs->start_log_anew();
    if (!request.checkpoint_directory.empty()) remove_unfinished_checkpoints(request.checkpoint_directory);
    if (observer.on_start) observer.on_start(run.start);
    summary = start_summary(run);
    summary.predicted_bubble = predicted.bubble_fraction;
  });
  run.start.first_step = run.resumed.step;
  run.epoch = Clock::now();  // processes have just met
  std::optional<ThreadWorld> threads;
  if (options.processes == nullptr)
    threads.emplace(num_ranks(plan, request.asynchronous), options.timeout, options.failure_hooks);
  World& world = threads ? static_cast<World&>(*threads) : *options.processes;
  try {
    world.run([&](int index) { run_rank(run, world, index, summary); });
  } catch (const RequestError&) {  // a checkpoint that is damaged inside
    if (outputs) outputs->remove_new_log();
    throw;
  }
  if (options.leads()) compare_timelines(run.pipeline->programs(0), summary);
  return summary;
}

}  // namespace echelon
