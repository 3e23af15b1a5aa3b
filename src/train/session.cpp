#include "train/session.h"

#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <optional>

#include "base/error.h"
#include "base/median.h"
#include "base/units.h"
#include "plan/cost.h"
#include "plan/memory.h"
#include "plan/traffic.h"
#include "schedule/simulate.h"
#include "train/checkpoint.h"
#include "train/trainer.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The log and the checkpoint directory. A request that is refused leaves neither behind, and an earlier log
// as it was.
class Outputs {
 public:
  explicit Outputs(const TrainRequest& request) : log_path_(request.log_path) {
    std::error_code error;
    if (!log_path_.empty()) {
      had_log_ = fs::exists(log_path_, error);
      open_log(std::ios::app);
    }
    if (request.checkpoint_directory.empty()) return;
    fs::create_directories(request.checkpoint_directory, error);
    if (!error && !fs::is_directory(request.checkpoint_directory))
      error = std::make_error_code(std::errc::not_a_directory);
    if (!error && ::access(request.checkpoint_directory.c_str(), W_OK | X_OK) != 0)
      error = std::error_code(errno, std::generic_category());
    if (!error) return;
    remove_new_log();
    refuse("--checkpoint {}: cannot be written: {}", request.checkpoint_directory, error.message());
  }
  // Nothing more is refused: an earlier log makes room for this one.
  void start_log_anew() {
    if (log_path_.empty()) return;
    log_.close();
    open_log(std::ios::trunc);
  }
  void write_log(const std::string& line) {
    if (log_path_.empty()) return;
    log_ << line << std::endl;  // flushed: a run that is killed keeps its log
    if (!log_) fail("--log {}: cannot be written any more: {}", log_path_, std::strerror(errno));
  }
  void remove_new_log() {
    std::error_code error;
    if (!log_path_.empty() && !had_log_ && fs::file_size(log_path_, error) == 0) fs::remove(log_path_, error);
  }

 private:
  void open_log(std::ios::openmode mode) {
    errno = 0;
    log_.open(log_path_, std::ios::out | mode);
    if (!log_) refuse("--log {}: cannot be written: {}", log_path_, std::strerror(errno));
  }
  std::string log_path_;
  bool had_log_ = false;
  std::ofstream log_;
};

// What all ranks share, fixed before they start.
struct Shared {
  const TrainRequest& request;
  const TokenData& data;
  Split split;
  CheckpointInfo resumed;  // path empty: from the start
  StartInfo start;
  const TrainObserver& observer;
  std::shared_ptr<const PipelineLayout> pipeline;
  Outputs* outputs = nullptr;              // used by rank 0 alone
  Clock::time_point epoch = Clock::now();  // zero of the measured timeline
};

std::int64_t num_validation_samples(const Shared& s) {
  return std::min(s.request.eval_samples, (s.split.validation.size() - 1) / s.request.plan.seq_len);
}

void publish(const Shared& s, const StepRecord& record, TrainSummary& summary) {
  summary.steps += 1;
  summary.last_step = record.step;
  summary.final_loss = record.loss;
  s.outputs->write_log(to_json(record));
  if (s.observer.on_step) s.observer.on_step(record);
}

double mfu(const Shared& s, double tokens_per_second) {
  const Plan& plan = s.request.plan;
  return tokens_per_second * model_flops_per_token(plan.model, plan.seq_len) / s.start.peak_flops;
}

StepRecord record_of(const Shared& s, const StepResult& result, std::int64_t tokens, double seconds) {
  StepRecord record;
  record.step = result.step + 1;
  record.loss = result.loss;
  record.grad_norm = result.gradient_norm;
  record.lr = result.learning_rate;
  record.tokens = tokens;
  record.step_seconds = seconds;
  record.tokens_per_second = static_cast<double>(tokens) / seconds;
  record.mfu = mfu(s, record.tokens_per_second);
  return record;
}

AsynchronousRun asynchronous_run(const Shared& s) {
  return {*s.request.asynchronous, s.resumed.step, s.request.optimizer.total_steps, s.request.run.timeout};
}

// By the first of the ranks that hold it.
void save_to(const Shared& s, const Rank& rank, const ParameterStore& parameters, CheckpointInfo info,
             TrainSummary& summary, const std::vector<CarriedTensor>& carried = {}) {
  if (s.request.checkpoint_directory.empty()) return;
  info.seed = s.request.seed;
  info.dtype = rank.dtype();
  info.model = s.request.plan.model;
  info.compression = s.request.plan.compression;
  const std::string path = save_checkpoint(rank, parameters, s.request.checkpoint_directory, info, carried);
  if (rank.index() > 0) return;
  summary.checkpoint = path;
  if (s.observer.on_checkpoint) s.observer.on_checkpoint(path);
}

class RankRun {
 public:
  RankRun(const Shared& shared, const Rank& rank, TrainSummary& summary)
      : s_(shared),
        rank_(rank),
        trainer_(rank, shared.request.plan, shared.request.optimizer, shared.request.seed, {},
                 shared.pipeline),
        summary_(summary) {
    const auto& straggler = shared.request.straggler;
    if (straggler && straggler->rank == rank.index()) trainer_.set_slowdown(straggler->factor);
  }

  void run() {
    if (s_.request.asynchronous) return run_as_worker();
    const std::int64_t last = s_.request.optimizer.total_steps;
    if (!s_.resumed.path.empty()) {
      load_checkpoint(rank_, trainer_.parameters(), s_.resumed, false, trainer_.carried());
      trainer_.resume(s_.resumed.step, s_.resumed.updates);
    }
    rank_.arena().reset_peak();
    for (std::int64_t step = s_.start.first_step; step < last; ++step) {
      train_step(step);
      const bool end = step + 1 == last;
      if (end || (s_.request.eval_every > 0 && (step + 1) % s_.request.eval_every == 0)) evaluate(step);
      if (end || saves_after(step)) save(step);
    }
    keep_shown_runs();
    if (leads()) {
      summary_.measured_memory = rank_.arena().peak();
      // The first and last steps of a stream differ from the others; together they are as many whole steps.
      if (!trainer_.flushes()) summary_.measured_traffic = traffic_ / summary_.steps;
      summary_.step_seconds = median(step_seconds_);
      if (summary_.step_seconds > 0) {
        summary_.tokens_per_second = static_cast<double>(step_tokens()) / summary_.step_seconds;
        summary_.mfu = mfu(s_, summary_.tokens_per_second);
      }
    }
    if (s_.request.sample_tokens > 0) sample_text();
  }

 private:
  // The servers bring the values, and save them.
  void run_as_worker() {
    const AsynchronousRun run = asynchronous_run(s_);
    const auto all = join_all(rank_, rank_.size(Axis::dp), run.options.servers);
    trainer_.parameters().release_moments();
    rank_.arena().reset_peak();
    Traffic before = rank_.traffic();
    run_worker(*all, trainer_, run, source(s_.split.train, s_.request.plan.seq_len), [&] {
      keep_run();
      if (leads()) summary_.measured_traffic = rank_.traffic() - std::exchange(before, rank_.traffic());
    });
    keep_shown_runs();
    evaluate(run.last_step - 1);
    if (leads()) summary_.measured_memory = rank_.arena().peak();
    all->barrier().wait();  // then the servers save
    all->barrier().wait();
    if (s_.request.sample_tokens > 0) sample_text();
  }

  void keep_run() {
    shown_runs_.push_back(trainer_.last_run());
    if (static_cast<int>(shown_runs_.size()) > s_.pipeline->programs(0).shown_steps())
      shown_runs_.pop_front();
  }

  // Each rank of the first pipeline fills its own place.
  void keep_shown_runs() {
    if (rank_.coordinate(Axis::dp) == 0 && rank_.coordinate(Axis::tp) == 0) {
      const auto place = static_cast<std::size_t>(rank_.coordinate(Axis::pp));
      auto& all = summary_.measured_timeline.ranks[place];
      for (const PipelineRun& run : shown_runs_) {
        const std::vector<Span> spans = run.spans_since(s_.epoch);
        all.insert(all.end(), spans.begin(), spans.end());
      }
      if (!trainer_.flushes()) summary_.measured_staleness[place] = max_staleness_;
    }
  }

  bool leads() const { return rank_.index() == 0; }
  std::int64_t step_tokens() const { return s_.request.plan.global_batch * s_.request.plan.seq_len; }
  SampleSource source(Range range, std::int64_t seq_len) const {
    return [sampler = Sampler(s_.data, range, s_.request.seed), seq_len](
               std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
      sampler.sample(step, sample, seq_len, tokens, targets);
    };
  }

  bool saves_after(std::int64_t step) const {
    return s_.request.save_every > 0 && (step + 1) % s_.request.save_every == 0;
  }
  // Until the next checkpoint or the end, where the pipeline must be empty; without a barrier in the
  // optimizer until the next evaluation too, which wants the true weights.
  std::int64_t steps_left(std::int64_t step) const {
    std::int64_t until = s_.request.optimizer.total_steps;
    const auto stop_at = [&](std::int64_t every) {
      if (every > 0) until = std::min(until, (step / every + 1) * every);
    };
    if (!s_.request.checkpoint_directory.empty()) stop_at(s_.request.save_every);
    if (trainer_.flushes()) stop_at(s_.request.eval_every);
    return until - step;
  }

  void train_step(std::int64_t step) {
    const Traffic before = rank_.traffic();
    const auto begin = Clock::now();
    const auto results =
        trainer_.step(step, source(s_.split.train, s_.request.plan.seq_len), steps_left(step));
    keep_run();
    max_staleness_ = std::max(max_staleness_, trainer_.last_run().max_staleness);
    if (!leads()) return;
    summary_.measured_traffic = rank_.traffic() - before;
    if (trainer_.parameters().gathers()) summary_.gathers = trainer_.parameters().gather()->measures();
    traffic_ += summary_.measured_traffic;
    step_seconds_.push_back(seconds_since(begin));
    for (const StepResult& result : results) report(result);
  }

  void report(const StepResult& result) {
    summary_.taken_back += result.taken_back;
    publish(s_,
            record_of(s_, result, step_tokens(),
                      step_seconds_[static_cast<std::size_t>(result.step - s_.start.first_step)]),
            summary_);
  }

  // The first sequences of the held-out part, one after another: the same at every evaluation.
  void evaluate(std::int64_t step) {
    const std::int64_t samples = s_.split.validation.size() > 0 ? num_validation_samples(s_) : 0;
    if (samples == 0) return;
    const std::int64_t seq_len = s_.request.plan.seq_len, begin = s_.split.validation.begin;
    const double loss = trainer_.evaluate(
        samples, [&](std::int64_t, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
          s_.data.copy(begin + sample * seq_len, seq_len, tokens);
          s_.data.copy(begin + sample * seq_len + 1, seq_len, targets);
        });
    if (!leads()) return;
    summary_.validation_loss = loss;
    s_.outputs->write_log(evaluation_json(step + 1, loss));
    if (s_.observer.on_evaluation) s_.observer.on_evaluation(step + 1, loss);
  }

  void save(std::int64_t step) {
    CheckpointInfo info;
    info.step = step + 1;
    info.updates = trainer_.updates(step + 1);
    info.tokens = s_.resumed.tokens + (step + 1 - s_.start.first_step) * step_tokens();
    save_to(s_, rank_, trainer_.parameters(), info, summary_, trainer_.carried());
  }

  // Continues the beginning of the held-out part, or of the training part where nothing is held out.
  void sample_text() {
    const Range range = s_.split.validation.size() > 0 ? s_.split.validation : s_.split.train;
    std::vector<std::int32_t> prompt(static_cast<std::size_t>(std::min<std::int64_t>(
        {32, range.size(), s_.request.plan.model.max_seq - s_.request.sample_tokens})));
    s_.data.copy(range.begin, static_cast<std::int64_t>(prompt.size()), prompt.data());
    GenerateOptions options = s_.request.generate;
    options.max_tokens = s_.request.sample_tokens;
    const auto text = generate(rank_, s_.request.plan, trainer_.parameters(), prompt, options);
    if (leads() && s_.observer.on_sample) s_.observer.on_sample(prompt, text);
  }

  const Shared& s_;
  const Rank& rank_;
  Trainer trainer_;
  TrainSummary& summary_;
  std::vector<double> step_seconds_;
  Traffic traffic_;                     // of all steps
  std::deque<PipelineRun> shown_runs_;  // the last ones
  int max_staleness_ = 0;
};

// One of the parameter servers, from the first batch to the checkpoint.
class ServerRun {
 public:
  ServerRun(const Shared& shared, const Rank& rank, TrainSummary& summary)
      : s_(shared),
        rank_(rank),
        run_(asynchronous_run(shared)),
        server_(rank, shared.request.plan, shared.request.optimizer, shared.request.seed, run_),
        summary_(summary) {}

  void run() {
    const int workers = s_.request.plan.mesh.size(Axis::dp);
    const auto all = join_all(rank_, workers, run_.options.servers);
    if (!s_.resumed.path.empty()) {
      load_checkpoint(rank_, server_.parameters(), s_.resumed, false);
      server_.resume(s_.resumed.updates);
    }
    const StalenessMeasures staleness = server_.serve(*all, [this](const ServedStep& step) { report(step); });
    if (leads()) summarize(staleness);
    all->barrier().wait();  // the workers have evaluated
    CheckpointInfo info;
    info.step = run_.last_step;
    info.updates = server_.updates();
    info.tokens = s_.resumed.tokens + tokens_;
    save_to(s_, rank_, server_.parameters(), info, summary_);
    all->barrier().wait();
  }

 private:
  bool leads() const { return rank_.index() == 0; }

  void report(const ServedStep& step) {
    const StepRecord record =
        record_of(s_, step.result, step.sequences * s_.request.plan.seq_len, step.seconds);
    tokens_ += record.tokens;
    seconds_ += step.seconds;
    if (leads()) publish(s_, record, summary_);
  }

  // Over the whole run: where workers take turns as they come, no step is typical.
  void summarize(const StalenessMeasures& staleness) {
    summary_.step_seconds = seconds_ / static_cast<double>(summary_.steps);
    summary_.tokens_per_second = static_cast<double>(tokens_) / seconds_;
    summary_.mfu = mfu(s_, summary_.tokens_per_second);
    AsynchronousSummary& a = summary_.asynchronous.emplace();
    a.bound = run_.options.staleness;
    a.histogram = staleness.histogram;
    a.mean_updates_late =
        static_cast<double>(staleness.sum_updates_late) / static_cast<double>(staleness.pushes);
    a.max_updates_late = staleness.max_updates_late;
    a.updates = server_.updates() - s_.resumed.updates;
  }

  const Shared& s_;
  const Rank& rank_;
  AsynchronousRun run_;
  ParameterServerRank server_;
  TrainSummary& summary_;
  std::int64_t tokens_ = 0;
  double seconds_ = 0;
};

void refuse_straggler(const TrainRequest& request) {
  if (!request.straggler) return;
  const int ranks = request.plan.mesh.num_ranks();
  const auto& [rank, factor] = *request.straggler;
  if (rank < 0 || rank >= ranks)
    refuse("--straggle {}:{}: rank {} is none of 0 to {}", rank, factor, rank, ranks - 1);
  if (!(factor >= 1 && factor <= 1000))
    refuse("--straggle {}:{}: the factor must be from 1 to 1000", rank, factor);
}

void refuse_asynchronous(const TrainRequest& request) {
  if (!request.asynchronous) return;
  refuse_asynchronous(request.plan, *request.asynchronous);
  for (const auto& [flag, every] :
       {std::pair{"--eval-every", request.eval_every}, {"--save-every", request.save_every}})
    if (every != 0)
      refuse(
          "{} {}: with --staleness there is no moment at which all workers have the same values but the end; "
          "legal: 0",
          flag, every);
}

// What would stop the run when it saves: found before it starts.
void refuse_obstacles(const TrainRequest& request, std::int64_t first_step) {
  const std::string& directory = request.checkpoint_directory;
  if (is_checkpoint(directory))
    refuse("--checkpoint {}: is one checkpoint itself; name the directory above it", directory);
  const std::int64_t last = request.optimizer.total_steps;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(directory, none)) {
    const std::optional<std::int64_t> step = checkpoint_step(entry.path().string());
    if (step && *step > first_step && *step <= last)
      refuse("--checkpoint {}: {} is in the way, and is not a whole checkpoint; remove it", directory,
             entry.path().filename().string());
  }
}

// What must hold of the checkpoint directory before a rank starts.
CheckpointInfo find_resumed(const TrainRequest& request) {
  CheckpointInfo info;
  if (request.resume) {
    if (request.checkpoint_directory.empty())
      refuse("--resume: needs --checkpoint DIR, the directory to go on from");
    info = read_checkpoint_info(request.checkpoint_directory);
    if (to_toml(info.model) != to_toml(request.plan.model))
      refuse("--resume {}: it holds the model {}, not {}", info.path, info.model.name,
             request.plan.model.name);
    if (info.dtype != request.plan.dtype)
      refuse("--resume {}: it was trained in {}, not {}", info.path, dtype_name(info.dtype),
             dtype_name(request.plan.dtype));
    if (info.seed != request.seed)
      refuse("--resume {}: it was trained with --seed {}, not {}: the order of the data would change",
             info.path, info.seed, request.seed);
    if (info.residual_ranks > 0 &&
        (!has_residuals(request.plan.compression.kind) || request.plan.mesh.size(Axis::dp) == 1))
      refuse(
          "--resume {}: it holds what --compress {} has not sent yet of the gradients, and without "
          "compression "
          "between data-parallel ranks that would be lost; legal: --compress {} and --dp of at least 2",
          info.path, compression_text(info.compression), compression_text(info.compression));
    if (info.step >= request.optimizer.total_steps)
      refuse("--steps {}: {} has {} steps behind it already; name a larger number",
             request.optimizer.total_steps, info.path, info.step);
  } else if (!request.checkpoint_directory.empty()) {
    const auto existing = list_checkpoints(request.checkpoint_directory);
    if (!existing.empty())
      refuse("--checkpoint {}: holds {} already; add --resume to go on from it, or name another directory",
             request.checkpoint_directory, fs::path(existing.back()).filename().string());
  }
  if (!request.checkpoint_directory.empty()) refuse_obstacles(request, info.step);
  return info;
}

}  // namespace

TrainSummary train(const TrainRequest& request, const TokenData& data, const TrainObserver& observer) {
  const Plan& plan = request.plan;
  validate(plan);
  const auto pipeline = std::make_shared<PipelineLayout>(plan);
  validate(request.optimizer);
  refuse_clipping(request.optimizer, *pipeline);
  refuse_asynchronous(request);
  refuse_straggler(request);
  if (request.optimizer.total_steps < 1)
    refuse("--steps {}: must be at least 1", request.optimizer.total_steps);
  if (request.optimizer.warmup_steps > request.optimizer.total_steps)
    refuse("--warmup {}: more than the {} --steps", request.optimizer.warmup_steps,
           request.optimizer.total_steps);
  for (const auto& [flag, value] : {std::pair{"--eval-every", request.eval_every},
                                    {"--eval-samples", request.eval_samples},
                                    {"--save-every", request.save_every},
                                    {"--sample", request.sample_tokens}})
    if (value < 0) refuse("{} {}: must be at least 0", flag, value);
  if (request.sample_tokens > 0 && request.sample_tokens >= plan.model.max_seq)
    refuse("--sample {}: {} has positions for {}, and one is the prompt's", request.sample_tokens,
           plan.model.name, plan.model.max_seq);
  Shared shared{request,
                data,
                split_tokens(data.size(), request.validation_fraction, plan.seq_len),
                find_resumed(request),
                {},
                observer,
                pipeline};
  if (plan.offload != Offload::none) check_scratch_directory(plan.offload_directory);
  const auto& asynchronous = request.asynchronous;
  refuse_beyond_memory(
      plan, plan.mesh.num_ranks() * predicted_bytes(plan) +
                (asynchronous ? static_cast<double>(predicted_server_bytes(plan, *asynchronous)) : 0.0));
  StartInfo& start = shared.start;
  start.train_tokens = shared.split.train.size();
  start.validation_tokens = shared.split.validation.size();
  start.num_files = data.num_files();
  start.num_params = num_parameters(plan.model);
  start.first_step = shared.resumed.step;
  start.resumed_from = shared.resumed.path;
  start.predicted_memory = predict_memory(plan, *pipeline);
  start.predicted_memory[MemoryCategory::other] =
      kernel_scratch_bytes(plan.dtype, request.run.threads_per_rank);
  if (asynchronous) start.predicted_memory[MemoryCategory::optimizer] = 0;  // the servers have it
  const int ranks = plan.mesh.num_ranks();
  start.peak_flops =
      measure_matmul_flops(plan.dtype, std::min(available_cores(), ranks * request.run.threads_per_rank));
  const int workers = std::min(available_cores(), ranks * request.run.threads_per_rank);
  const StepPrediction predicted = predict_step(
      plan, *pipeline,
      {start.peak_flops,
       start.peak_flops * std::min(1.0, static_cast<double>(request.run.threads_per_rank) / workers)});
  start.predicted_step_seconds = predicted.seconds;
  if (!pipeline->programs(0).flushes()) start.staleness = staleness(pipeline->programs(0).schedule());
  Outputs outputs(request);
  if (!request.resume) outputs.start_log_anew();
  shared.outputs = &outputs;
  if (observer.on_start) observer.on_start(start);

  TrainSummary summary;
  summary.ranks = num_ranks(plan, asynchronous);
  summary.num_params = start.num_params;
  summary.predicted_memory = start.predicted_memory;
  summary.predicted_traffic = asynchronous ? predict_worker_traffic(plan, *pipeline, *asynchronous)
                                           : predict_traffic(plan, *pipeline);
  summary.predicted_step_seconds = start.predicted_step_seconds;
  summary.predicted_bubble = predicted.bubble_fraction;
  summary.measured_timeline.ranks.resize(static_cast<std::size_t>(plan.mesh.size(Axis::pp)));
  summary.predicted_staleness = start.staleness;
  summary.measured_staleness.resize(start.staleness.size());
  ThreadWorld world(summary.ranks, request.run.timeout);
  try {
    run_ranks(world, [&](int index) {
      Arena arena;
      const auto kernels = make_kernels(arena, plan.dtype, request.run.threads_per_rank);
      if (index >= ranks) {
        const Rank rank(world, server_plan(plan, asynchronous->servers).mesh, index - ranks, plan.dtype,
                        arena, *kernels, Collectives::direct, ranks);
        return ServerRun(shared, rank, summary).run();
      }
      const Rank rank(world, plan.mesh, index, plan.dtype, arena, *kernels);
      RankRun(shared, rank, summary).run();
    });
  } catch (const RequestError&) {  // a checkpoint that is damaged inside
    outputs.remove_new_log();
    throw;
  }
  if (summary.measured_timeline.ranks.front().empty()) return summary;  // others took all batches
  summary.measured_bubble = summary.measured_timeline.bubble_fraction();
  summary.simulated_timeline =
      simulated_twin(pipeline->programs(0), measured_costs(summary.measured_timeline), summary.steps,
                     pipeline->programs(0).shown_steps());
  return summary;
}

}  // namespace echelon
