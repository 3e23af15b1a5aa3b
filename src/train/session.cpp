#include "train/session.h"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "plan/cost.h"
#include "plan/memory.h"
#include "plan/traffic.h"
#include "train/checkpoint.h"
#include "train/trainer.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Traffic difference(const Traffic& after, const Traffic& before) {
  Traffic sent = after;
  for (Axis axis : all_axes)
    for (Verb verb : all_verbs) {
      sent.at(axis, verb).calls -= before.at(axis, verb).calls;
      sent.at(axis, verb).bytes -= before.at(axis, verb).bytes;
    }
  return sent;
}

// Rank 0 writes the log; the others have none.
class StepLog {
 public:
  explicit StepLog(const std::string& path, bool append) : path_(path) {
    if (path.empty()) return;
    out_.open(path, append ? std::ios::app : std::ios::trunc);
    if (!out_) refuse("--log {}: cannot be written", path);
  }
  void write(const std::string& line) {
    if (path_.empty()) return;
    out_ << line << std::endl;  // flushed: a run that is killed keeps its log
    if (!out_) fail("--log {}: cannot be written any more (disk full?)", path_);
  }

 private:
  std::string path_;
  std::ofstream out_;
};

// What all ranks share, fixed before they start.
struct Shared {
  const TrainRequest& request;
  const TokenData& data;
  Split split;
  CheckpointInfo resumed;  // path empty: from the start
  StartInfo start;
  const TrainObserver& observer;
};

std::int64_t num_validation_samples(const Shared& s) {
  return std::min(s.request.eval_samples, (s.split.validation.size() - 1) / s.request.plan.seq_len);
}

class RankRun {
 public:
  RankRun(const Shared& shared, const Rank& rank, TrainSummary& summary)
      : s_(shared),
        rank_(rank),
        trainer_(rank, shared.request.plan, shared.request.optimizer, shared.request.seed),
        log_(rank.index() == 0 ? shared.request.log_path : "", shared.request.resume),
        summary_(summary) {}

  void run() {
    const std::int64_t last = s_.request.optimizer.total_steps;
    if (!s_.resumed.path.empty()) load_checkpoint(rank_, trainer_.parameters(), s_.resumed, false);
    rank_.arena().reset_peak();
    for (std::int64_t step = s_.start.first_step; step < last; ++step) {
      train_step(step);
      const bool end = step + 1 == last;
      if (end || (s_.request.eval_every > 0 && (step + 1) % s_.request.eval_every == 0)) evaluate(step);
      if (end || (s_.request.save_every > 0 && (step + 1) % s_.request.save_every == 0)) save(step);
    }
    if (leads()) {
      summary_.measured_memory = rank_.arena().peak();
      summary_.step_seconds = median(step_seconds_);
      if (summary_.step_seconds > 0) {
        summary_.tokens_per_second = static_cast<double>(step_tokens()) / summary_.step_seconds;
        summary_.mfu = mfu(summary_.tokens_per_second);
      }
    }
    if (s_.request.sample_tokens > 0) sample_text();
  }

 private:
  bool leads() const { return rank_.index() == 0; }
  std::int64_t step_tokens() const { return s_.request.plan.global_batch * s_.request.plan.seq_len; }
  double mfu(double tokens_per_second) const {
    return tokens_per_second * model_flops_per_token(s_.request.plan.model, s_.request.plan.seq_len) /
           s_.start.peak_flops;
  }

  SampleSource source(Range range, std::int64_t seq_len) const {
    return [sampler = Sampler(s_.data, range, s_.request.seed), seq_len](
               std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
      sampler.sample(step, sample, seq_len, tokens, targets);
    };
  }

  void train_step(std::int64_t step) {
    const Traffic before = rank_.traffic();
    const auto begin = Clock::now();
    StepRecord record;
    record.loss = trainer_.compute_gradients(step, source(s_.split.train, s_.request.plan.seq_len));
    const Trainer::Applied applied = trainer_.apply_gradients(step);
    record.step_seconds = seconds_since(begin);
    if (!leads()) return;
    record.step = step + 1;
    record.grad_norm = applied.gradient_norm;
    record.lr = applied.learning_rate;
    record.tokens = step_tokens();
    record.tokens_per_second = static_cast<double>(record.tokens) / record.step_seconds;
    record.mfu = mfu(record.tokens_per_second);
    step_seconds_.push_back(record.step_seconds);
    summary_.measured_traffic = difference(rank_.traffic(), before);
    summary_.steps += 1;
    summary_.last_step = record.step;
    summary_.final_loss = record.loss;
    log_.write(to_json(record));
    if (s_.observer.on_step) s_.observer.on_step(record);
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
    log_.write(fmt::format("{{\"step\": {}, \"validation_loss\": {}}}", step + 1, loss));
    if (s_.observer.on_evaluation) s_.observer.on_evaluation(step + 1, loss);
  }

  void save(std::int64_t step) {
    if (s_.request.checkpoint_directory.empty()) return;
    CheckpointInfo info;
    info.step = step + 1;
    info.seed = s_.request.seed;
    info.tokens = s_.resumed.tokens + (step + 1 - s_.start.first_step) * step_tokens();
    info.dtype = rank_.dtype();
    info.model = s_.request.plan.model;
    const std::string path =
        save_checkpoint(rank_, trainer_.parameters(), s_.request.checkpoint_directory, info);
    if (!leads()) return;
    summary_.checkpoint = path;
    if (s_.observer.on_checkpoint) s_.observer.on_checkpoint(path);
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
  StepLog log_;
  TrainSummary& summary_;
  std::vector<double> step_seconds_;
};

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
    if (info.step >= request.optimizer.total_steps)
      refuse("--steps {}: {} has {} steps behind it already; name a larger number",
             request.optimizer.total_steps, info.path, info.step);
  } else if (!request.checkpoint_directory.empty()) {
    const auto existing = list_checkpoints(request.checkpoint_directory);
    if (!existing.empty())
      refuse("--checkpoint {}: holds {} already; add --resume to go on from it, or name another directory",
             request.checkpoint_directory, std::filesystem::path(existing.back()).filename().string());
  }
  return info;
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

double measure_matmul_flops(DType dtype, int threads) {
  Arena arena;
  const auto kernels = make_kernels(arena, dtype, threads);
  const std::int64_t n = dtype == DType::f64 ? 192 : 1024;  // reference kernels are slow
  const Tensor a(arena, MemoryCategory::other, dtype, {n, n}), b(arena, MemoryCategory::other, dtype, {n, n}),
      c(arena, MemoryCategory::other, dtype, {n, n});
  kernels->fill(a, 0.5);
  kernels->fill(b, 0.25);
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const auto begin = Clock::now();
    kernels->matmul(a, Transpose::no, b, Transpose::no, c, false);
    best = std::max(best, 2.0 * static_cast<double>(n * n * n) / seconds_since(begin));
  }
  return best;
}

TrainSummary train(const TrainRequest& request, const TokenData& data, const TrainObserver& observer) {
  const Plan& plan = request.plan;
  validate(plan);
  validate(request.optimizer);
  if (request.optimizer.total_steps < 1)
    refuse("--steps {}: must be at least 1", request.optimizer.total_steps);
  if (request.optimizer.warmup_steps > request.optimizer.total_steps)
    refuse("--warmup {}: more than the {} --steps", request.optimizer.warmup_steps,
           request.optimizer.total_steps);
  if (request.sample_tokens > 0 && request.sample_tokens >= plan.model.max_seq)
    refuse("--sample {}: {} has positions for {}, and one is the prompt's", request.sample_tokens,
           plan.model.name, plan.model.max_seq);
  Shared shared{request,
                data,
                split_tokens(data.size(), request.validation_fraction, plan.seq_len),
                find_resumed(request),
                {},
                observer};
  if (!request.checkpoint_directory.empty()) {
    std::error_code error;
    std::filesystem::create_directories(request.checkpoint_directory, error);
    if (error) refuse("--checkpoint {}: cannot be made: {}", request.checkpoint_directory, error.message());
  }
  StartInfo& start = shared.start;
  start.train_tokens = shared.split.train.size();
  start.validation_tokens = shared.split.validation.size();
  start.num_files = data.num_files();
  start.num_params = num_parameters(plan.model);
  start.first_step = shared.resumed.step;
  start.resumed_from = shared.resumed.path;
  start.predicted_memory = predict_memory(plan, 0, 0);
  start.predicted_memory[MemoryCategory::other] =
      kernel_scratch_bytes(plan.dtype, request.run.threads_per_rank);
  const int ranks = plan.mesh.num_ranks();
  start.peak_flops =
      measure_matmul_flops(plan.dtype, std::min(available_cores(), ranks * request.run.threads_per_rank));
  start.predicted_step_seconds = predict_step_seconds(plan, start.peak_flops);
  if (observer.on_start) observer.on_start(start);

  TrainSummary summary;
  summary.ranks = ranks;
  summary.num_params = start.num_params;
  summary.predicted_memory = start.predicted_memory;
  summary.predicted_traffic = predict_traffic(plan, 0, 0);
  summary.predicted_step_seconds = start.predicted_step_seconds;
  ThreadWorld world(ranks, request.run.timeout);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.dtype, request.run.threads_per_rank);
    const Rank rank(world, plan.mesh, index, plan.dtype, arena, *kernels);
    RankRun(shared, rank, summary).run();
  });
  return summary;
}

}  // namespace echelon
