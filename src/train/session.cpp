#include "train/session.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/json_text.h"
#include "checkpoint/checkpoint_directory.h"
#include "checkpoint/checkpoint_size.h"
#include "data/checksum.h"
#include "plan/cost.h"

#include "schedule/simulate.h"
#include "train/account_json.h"
#include "train/dry_run.h"
#include "train/job_builds.h"
#include "train/rank_run.h"
#include "train/refuse_request.h"
#include "train/rehearsal.h"
#include "train/server_run.h"

namespace echelon {
namespace {

// The most steps that run into one another. They come again and again: the first few show the longest, or
// that there are several.
std::int64_t steps_without_a_stop(const SharedRun& run) {
  const std::int64_t last = run.request.optimizer.total_steps;
  std::int64_t most = 0, step = run.resumed.step;
  for (int stretch = 0; stretch < 8 && step < last; ++stretch) {
    const std::int64_t steps = steps_until_empty(run, step, last);
    most = std::max(most, steps);
    step += steps;
  }
  return most;
}

StepMemory predicted_memory(const SharedRun& run) {
  DryRunOptions options = dry_run_options(run.request);
  options.steps = steps_without_a_stop(run);
  const StepMemory step = predict_memory(run.request.plan, *run.pipeline, {}, options);
  return {with_scratch(step, run.request), step.host};
}

// Cores of the whole job. A process may be bound to fewer of them than it shares the machine with.
struct JobMachine {
  JobCores cores;
  int ranks = 1;            // servers among them
  double busy_threads = 1;  // that compute at once
  int teams_here = 1;       // ranks' threads that this process has room for at once
};
JobMachine job_machine(const TrainRequest& request) {
  const RunOptions& options = request.run;
  const int ranks = num_ranks(request.plan, request.asynchronous), per_rank = options.threads_per_rank;
  const int here = options.ranks_here(ranks);
  const double cores = options.processes != nullptr ? machine_cores() : usable_cores();
  JobMachine machine;
  machine.cores = {cores * ranks / here, static_cast<double>(per_rank)};
  machine.ranks = ranks;
  machine.busy_threads =
      std::min<double>(machine.cores.cores, static_cast<double>(request.plan.mesh.num_ranks()) * per_rank);
  machine.teams_here = std::clamp(available_cores() / per_rank, 1, here);
  return machine;
}

// Of all threads that compute at once, from those of the ranks that fit here.
double measured_peak_flops(const TrainRequest& request, const JobMachine& machine) {
  if (DeviceDriver* const driver = request.run.driver.get())
    return measure_device_matmul_flops(*driver, request.run.own_device(0), request.plan.precision) *
           request.run.devices_in_use(machine.ranks);
  const int threads = std::min(request.run.threads_per_rank, available_cores());
  return measure_matmul_flops(request.plan.precision, machine.teams_here, threads) /
         (machine.teams_here * threads) * machine.busy_threads;
}

// A server receives and sends as much as its workers, and updates what they push.
std::vector<Traffic> traffic_by_pipeline_rank(const SharedRun& run) {
  const TrainRequest& request = run.request;
  std::vector<Traffic> all;
  for (int r = 0; r < request.plan.mesh.size(Axis::pp); ++r) {
    if (!request.asynchronous) {
      all.push_back(predict_traffic(request.plan, *run.pipeline, {.pp = r}));
      continue;
    }
    Traffic both = predict_worker_traffic(request.plan, *run.pipeline, *request.asynchronous);
    both += both;
    all.push_back(both);
  }
  return all;
}

StepPrediction rehearsed_step(const SharedRun& run, const JobMachine& machine) {
  const Plan& plan = run.request.plan;
  const RunOptions& options = run.request.run;
  const int ranks = plan.mesh.num_ranks();
  const RehearsalSize size =
      options.driver == nullptr
          ? rehearsal_on_host(plan, run.start.peak_flops, ranks)
          : rehearsal_on_device(plan, run.start.peak_flops / options.devices_in_use(ranks),
                                options.most_ranks_on_a_device(ranks));
  const PartSeconds parts = rehearse(plan, size, options, machine.cores);
  return predict_step(plan, *run.pipeline,
                      step_work(plan, *run.pipeline, parts, traffic_by_pipeline_rank(run)), machine.cores);
}

// All but what predict_step() says.
StartInfo start_info(const SharedRun& run, const JobMachine& machine) {
  StartInfo start;
  start.train_tokens = run.split.train.size();
  start.validation_tokens = run.split.validation.size();
  start.num_files = run.data.num_files();
  start.num_params = num_parameters(run.request.plan.model);
  start.trained_params = num_trained_parameters(run.request.plan.model);
  start.first_step = run.resumed.step;
  start.resumed_from = run.resumed.path;
  const StepMemory predicted = predicted_memory(run);
  start.predicted_memory = predicted;
  start.predicted_host = predicted.host;
  start.ranks = machine.ranks;
  start.cores = machine.cores;
  start.peak_flops =
      run.request.peak_flops ? *run.request.peak_flops : measured_peak_flops(run.request, machine);
  const StepPrograms& programs = run.pipeline->programs(0);
  if (!programs.flushes()) start.staleness = staleness(programs.schedule());
  return start;
}

// If its checkpoints will not all find room. Of a file system that does not say, nothing.
std::string note_on_disk(const SharedRun& run) {
  const TrainRequest& request = run.request;
  const std::string& directory = request.checkpoint_directory;
  std::error_code unknown;
  const std::filesystem::space_info disk = std::filesystem::space(directory, unknown);
  if (unknown || disk.capacity == 0) return "";
  const std::int64_t first = run.resumed.step, last = request.optimizer.total_steps;
  CheckpointDemand demand{.keep = request.keep, .there = std::ssize(list_checkpoints(directory))};
  if (const std::int64_t every = request.save_every; every > 0) demand.written = last / every - first / every;
  if (request.save_every == 0 || last % request.save_every != 0) ++demand.written;  // at the end
  return small_disk_note(directory, static_cast<double>(disk.available), checkpoint_bytes(request.plan),
                         demand);
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
  summary.ranks = run.start.ranks;
  summary.cores = run.start.cores;
  summary.num_params = run.start.num_params;
  summary.trained_params = run.start.trained_params;
  summary.predicted_memory = run.start.predicted_memory;
  summary.predicted_host = run.start.predicted_host;
  summary.predicted_traffic =
      predicted_traffic(run, run.request.optimizer.total_steps - run.start.first_step);
  summary.memory_assumptions = memory_assumptions(plan);
  summary.traffic_assumptions = traffic_assumptions(plan);
  summary.predicted_step_seconds = run.start.predicted_step_seconds;
  if (const auto& options = run.request.asynchronous)
    summary.asynchronous.emplace().predicted_memory =
        with_scratch(predict_server_memory(plan, *run.pipeline, *options, 0), run.request);
  summary.measured_timeline.ranks.resize(static_cast<std::size_t>(plan.mesh.size(Axis::pp)));
  summary.predicted_staleness = run.start.staleness;
  summary.measured_staleness.resize(run.start.staleness.size());
  return summary;
}

void run_rank(const SharedRun& run, World& world, int index, TrainSummary& summary) {
  const Plan& plan = run.request.plan;
  const Collectives collectives = run.request.run.collectives;
  const int workers = plan.mesh.num_ranks();
  std::optional<TraceRecorder> recording;
  // A worker's last batch is the one before the pull that tells it to stop.
  if (run.request.trace)
    recording.emplace(world.time(), run.epoch,
                      run.request.asynchronous ? 2 : run.pipeline->programs(0).shown_steps());
  TraceRecorder* const recorder = recording ? &*recording : nullptr;
  std::optional<Witness> witness;
  std::optional<WitnessedWorld> witnessed;
  if (run.request.check_every > 0 || run.request.flip) {
    const Witness::Hash hash = checksum;
    witness.emplace(hash);
    witnessed.emplace(world, *witness);
  }
  Arena arena(run.request.run.driver.get(), run.request.run.device_of(index),
              static_cast<std::size_t>(run.request.run.memory_limit));
  const auto kernels = make_kernels(arena, plan.precision, run.request.run.threads_per_rank, plan.numerics);
  if (index >= workers) {
    const Rank rank(world, server_plan(plan, run.request.asynchronous->servers).mesh, index - workers,
                    plan.precision, arena, *kernels, collectives, workers, recorder);
    return ServerRun(run, rank, summary).run();
  }
  World& heard = witnessed ? *witnessed : world;
  const Rank rank(heard, plan.mesh, index, plan.precision, arena, *kernels, collectives, 0, recorder);
  TrainSummary unused;  // rank 0's alone is read
  RankRun(run, rank, index == 0 || run.request.asynchronous ? summary : unused, witness ? &*witness : nullptr)
      .run();
}

void compare_timelines(const StepPrograms& programs, TrainSummary& summary) {
  if (summary.measured_timeline.ranks.front().empty()) return;  // other workers took all batches
  summary.measured_bubble = summary.measured_timeline.bubble_fraction();
  summary.simulated_timeline = simulated_twin(programs, measured_costs(summary.measured_timeline),
                                              summary.steps, programs.shown_steps());
}

// Of a run that has nothing left to do.
TrainSummary complete(const SharedRun& run) {
  TrainSummary summary;
  summary.complete = true;
  summary.last_step = run.resumed.step;
  summary.checkpoint = run.resumed.path;
  summary.num_params = num_parameters(run.request.plan.model);
  summary.trained_params = num_trained_parameters(run.request.plan.model);
  return summary;
}

// What the log says of a run before its first step.
std::string start_json(const SharedRun& run) {
  const Plan& plan = run.request.plan;
  return json_text(nlohmann::ordered_json{{"model", plan.model.name},
                                          {"params", run.start.num_params},
                                          {"mesh", plan.mesh.describe()},
                                          {"schedule", plan.schedule},
                                          {"zero", plan.zero_stage()},
                                          {"global_batch", plan.global_batch},
                                          {"seq_len", plan.seq_len},
                                          {"ranks", run.start.ranks},
                                          {"steps", run.request.optimizer.total_steps},
                                          {"resumed_from", run.start.resumed_from},
                                          {"predicted_step_seconds", run.start.predicted_step_seconds},
                                          {"predicted_memory_bytes", as_json(run.start.predicted_memory)},
                                          {"peak_flops", run.start.peak_flops}});
}

}  // namespace

// Beside plan and optimizer, what ranks do together.
static std::vector<std::string> common_settings(const TrainRequest& r) {
  const auto given = [](const char* flag, bool is) {
    return fmt::format("{} {}", is ? "with" : "without", flag);
  };
  return {given("--from", r.from != nullptr),
          given("--resume", r.resume),
          given("--checkpoint", !r.checkpoint_directory.empty()),
          given("--async-save on", r.save_beside),
          given("--trace or --timeline", r.trace),
          fmt::format("--val-fraction {}", r.validation_fraction),
          fmt::format("--eval-every {}", r.eval_every),
          fmt::format("--eval-samples {}", r.eval_samples),
          fmt::format("--save-every {}", r.save_every),
          fmt::format("--sample {}", r.sample_tokens),
          fmt::format("--on-nan {}", r.skip_nonfinite ? "skip" : "stop"),
          fmt::format("--fingerprint {}", r.fingerprint_every),
          fmt::format("--check-replicas {}", r.check_every),
          fmt::format("--rerun {}", r.rerun),
          fmt::format("--collectives {}", collectives_name(r.run.collectives))};
}

static void refuse_unshared_directory(const TrainRequest& request) {
  if (request.run.leads() || request.checkpoint_directory.empty()) return;
  const ProcessWorld& processes = *request.run.processes;
  const int rank = processes.rank();
  refuse_other_directory(
      request.checkpoint_directory,
      fmt::format("rank {} ({}): --checkpoint", rank, processes.nodes()[static_cast<std::size_t>(rank)]),
      processes.job());
}

TrainSummary train(const TrainRequest& request, const TokenData& data, const TrainObserver& observer) {
  const Plan& plan = request.plan;
  const RunOptions& options = request.run;
  std::optional<SharedRun> prepared;
  std::optional<CheckpointDirectory> directory;  // in the hands of the process that leads
  std::string resumed;
  const std::string other_builds = note_on_builds(options.processes);
  refuse_different_data(options.processes, data);
  refuse_different_settings(options.processes, plan, request.optimizer, request.seed,
                            common_settings(request));
  refuse_different_kernels(options, plan);
  refuse_together(options.processes, [&] {
    validate(plan);
    const auto pipeline = std::make_shared<PipelineLayout>(plan);
    refuse_impossible(request, *pipeline);
    refuse_unknown_tokens(data, plan.model);
    prepared.emplace(SharedRun{request,
                               data,
                               split_tokens(data.size(), request.validation_fraction, plan.seq_len),
                               {},
                               {},
                               observer,
                               pipeline});
    refuse_what_machine_lacks(request, *pipeline);
  });
  refuse_together(options.processes, [&] {
    if (!options.leads() || request.checkpoint_directory.empty()) return;
    directory.emplace(request.checkpoint_directory, "--checkpoint");
    if (options.processes != nullptr) directory->show(options.processes->job());
    if (request.resume) resumed = directory->find_last_whole(observer.on_progress);
  });
  if (options.processes != nullptr) resumed = options.processes->gather(resumed).front();
  SharedRun& run = *prepared;
  refuse_together(options.processes, [&] {
    refuse_unshared_directory(request);
    run.resumed = find_resumed(request, resumed, data);
  });
  if (request.resume && run.resumed.step == request.optimizer.total_steps) return complete(run);
  std::optional<ThreadWorld> threads;
  if (options.processes == nullptr)
    threads.emplace(num_ranks(plan, request.asynchronous), options.timeout, options.failure_hooks,
                    options.time);
  World& world = threads ? static_cast<World&>(*threads) : *options.processes;
  std::optional<RunOutputs> outputs;
  std::optional<Utilization> utilization;
  TrainSummary summary;
  refuse_together(options.processes, [&] {
    if (!options.leads()) return;
    const JobMachine machine = job_machine(request);
    run.start = start_info(run, machine);
    run.utilization = &utilization.emplace(run.start.peak_flops);
    const StepPrediction predicted =
        request.priced_step ? *request.priced_step : rehearsed_step(run, machine);
    run.start.predicted_step_seconds = predicted.seconds * predicted_slowdown(run, predicted);
    run.outputs = &outputs.emplace(request);
    outputs->start_logs(!request.resume, run.resumed.step);
    if (directory) {
      run.start.notes = directory->begin(world.job());
      if (!directory->warning().empty()) run.start.notes.push_back(directory->warning());
      if (std::string small = note_on_disk(run); !small.empty()) run.start.notes.push_back(std::move(small));
    }
    if (!other_builds.empty()) run.start.notes.push_back(other_builds);
    if (std::string changes = changed_settings(run); !changes.empty())
      run.start.notes.push_back(std::move(changes));
    if (observer.on_start) observer.on_start(run.start);
    summary = start_summary(run);
    summary.predicted_bubble = predicted.bubble_fraction;
    outputs->write_log(RunBegin{run.resumed.step, start_json(run)});
    if (!outputs->lost().empty()) fail("{}", outputs->lost());
  });
  run.start.first_step = run.resumed.step;
  run.epoch = world.time().now();  // processes have just met
  try {
    world.run(naming_lost_ranks(options, world.num_ranks(),
                                [&](int index) { run_rank(run, world, index, summary); }));
  } catch (const RequestError&) {  // a checkpoint that is damaged inside
    if (outputs) outputs->remove_new_logs();
    throw;
  }
  if (!options.leads()) return summary;
  // Products that something else on the machine slowed down: they are made again.
  if (utilization->was_exceeded() && !request.peak_flops)
    utilization->raise(measured_peak_flops(request, job_machine(request)));
  summary.mfu = utilization->of(summary.tokens_per_second * model_flops_per_token(plan.model, plan.seq_len));
  summary.peak_flops = utilization->peak_flops();
  compare_timelines(run.pipeline->programs(0), summary);
  outputs->write_log(RunEnd{summary.last_step, to_json(summary)});
  if (!outputs->lost().empty())
    fail("{}; the run ended after step {}{}", outputs->lost(), summary.last_step,
         summary.checkpoint.empty() ? "" : ", and is saved as " + summary.checkpoint);
  return summary;
}

}  // namespace echelon
