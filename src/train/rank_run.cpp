#include "train/rank_run.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <utility>

#include "base/median.h"
#include "checkpoint/finite.h"
#include "comm/host_group.h"
#include "train/generate.h"
#include "train/metrics.h"
#include "train/rank_timeline.h"

namespace echelon {

RankRun::RankRun(const SharedRun& shared, const Rank& rank, TrainSummary& summary, Witness* witness)
    : shared_(shared),
      rank_(rank),
      witness_(witness),
      trainer_(rank, shared.request.plan, shared.request.optimizer, shared.request.seed, hooks(),
               shared.pipeline, shared.request.asynchronous ? Moments::elsewhere : Moments::here,
               shared.first_values()),
      summary_(summary),
      meeting_(rank),
      writer_(rank, shared.request.checkpoint_directory),
      last_step_(shared.request.optimizer.total_steps) {
  if (shared.request.skip_nonfinite) trainer_.skip_nonfinite();
  if (shared.request.run.cuda_graphs) trainer_.replay_passes();
  if (flip_) flip_->set_parameters(trainer_.parameters());
  if (shared.request.check_every > 0) check_.emplace(rank, trainer_, *witness_);
  const auto& death = shared.request.death;
  if (death && death->rank == rank.index())
    writer_.set_watch([this, at = *death](const char* where) {
      if (at.where == where && saved_step_ == at.step) std::raise(SIGKILL);
    });
}

void RankRun::run() {
  const TrainRequest& request = shared_.request;
  if (request.asynchronous) return run_as_worker();
  if (!shared_.resumed.path.empty()) {
    trainer_.stages().set_router_biases(
        load_checkpoint(rank_, trainer_.parameters(), shared_.resumed, false, trainer_.carried()));
    trainer_.resume(shared_.resumed.step, shared_.resumed.updates);
  } else {
    if (request.from) trainer_.stages().set_router_biases(request.from->load(rank_, trainer_.parameters()));
    if (request.planted_expert)
      plant_expert(trainer_.parameters(), request.plan.model, *request.planted_expert);
  }
  rank_.arena().reset_peak();
  const std::int64_t asked_for = last_step_;
  for (std::int64_t step = shared_.start.first_step; step < last_step_; ++step) {
    has_spoken_ = false;
    if (!ends_with_step()) speak();
    if (check_)
      train_checked_step(step);
    else
      train_step(step);
    meet(step);
    const bool end = step + 1 == last_step_, stopped = last_step_ < asked_for;
    const bool fingerprints = fingerprints_after(step) || (end && request.fingerprint_every > 0);
    const bool evaluates =
        (end && !stopped) || (request.eval_every > 0 && (step + 1) % request.eval_every == 0);
    // Nothing is said or saved of weights that are not checked.
    if (check_ &&
        (end || (step + 1) % request.check_every == 0 || saves_after(step) || fingerprints || evaluates))
      check_replicas(step + 1);
    if (fingerprints) take_fingerprint(step);
    if (end || saves_after(step)) save(step);
    if (evaluates) evaluate(step);
  }
  refuse_idle_flip();
  finish_save();
  {
    const Doing doing = rank_.doing(Activity::meet);
    if (fingerprint_.under_way()) {
      meeting_.say(words_of_fingerprint());
      publish_fingerprint(meeting_.hear());
    }
  }
  gather_shown_runs();
  gather_traces();
  if (leads()) {
    summary_.stopped = last_step_ < asked_for;
    summarize();
  }
  if (request.sample_tokens > 0 && last_step_ == asked_for) sample_text();
}

void RankRun::meet(std::int64_t step) {
  const auto heard = [this] {
    const Doing doing = rank_.doing(Activity::meet);
    speak();  // of a step that broke off before its sums
    return meeting_.hear();
  }();
  const bool is_written = std::all_of(heard.begin(), heard.end(),
                                      [this](const auto& words) { return words.written == saved_step_; });
  if (writer_.under_way() && is_written) commit();
  const TrainRequest& request = shared_.request;
  const bool asked = [&] {
    if (!request.stops_at_once)
      return std::any_of(heard.begin(), heard.end(), [](const auto& words) { return words.stop; });
    const Doing doing = rank_.doing(Activity::meet);
    return meeting_.told_by_first(leads() && stop_requested());
  }();
  // A stream is emptied by one more step that knows that it is the last.
  if (asked) last_step_ = std::min(last_step_, step + (ends_with_step() ? 1 : 2));
  const bool is_first = step == shared_.start.first_step;  // there was no work before it
  if (request.straggler_every > 0 && !is_first) add_to_spread(step, heard);
  publish_fingerprint(heard);
}

void RankRun::speak() {
  if (has_spoken_) return;
  has_spoken_ = true;
  StepMeeting::Words words = words_of_fingerprint();
  words.stop = !shared_.request.stops_at_once && stop_requested();
  words.written = writer_.under_way() && writer_.written() ? saved_step_.load() : -1;
  words.seconds = step_work_;
  meeting_.say(words);
}

bool RankRun::stop_requested() const {
  if (leads() && !shared_.outputs->lost().empty()) return true;  // saved before it is an error
  return shared_.request.stop_requested && shared_.request.stop_requested();
}

bool RankRun::ends_with_step() const {
  return trainer_.flushes() && shared_.request.plan.optimizer_barrier;
}

StepMeeting::Words RankRun::words_of_fingerprint() {
  StepMeeting::Words words;
  if (!fingerprint_.under_way()) return words;
  words.fingerprinted = fingerprint_.step();
  words.fingerprint = fingerprint_.take();
  return words;
}

void RankRun::take_fingerprint(std::int64_t step) {
  const Doing doing = rank_.doing(Activity::fingerprint);
  fingerprint_.start(rank_, trainer_.parameters(), shared_.request.plan.model,
                     trainer_.stages().router_biases(), step + 1);
}

void RankRun::publish_fingerprint(const std::vector<StepMeeting::Words>& words) {
  if (words.empty() || words.front().fingerprinted < 0 || !leads()) return;
  std::uint64_t sum = 0;
  for (const auto& of_rank : words) sum += of_rank.fingerprint;
  publish_fingerprint_of(shared_, words.front().fingerprinted, fingerprint_text(sum), summary_);
}

void RankRun::add_to_spread(std::int64_t step, const std::vector<StepMeeting::Words>& words) {
  // They speak of the step before this one, the first of which counts from 1 as `step`.
  if (spread_.seconds.empty()) spread_ = {step, step, std::vector<double>(words.size())};
  spread_.last_step = step;
  for (std::size_t r = 0; r < words.size(); ++r) spread_.seconds[r] += words[r].seconds;
  const std::int64_t steps = spread_.last_step - spread_.first_step + 1;
  if (steps < shared_.request.straggler_every) return;
  for (double& seconds : spread_.seconds) seconds /= static_cast<double>(steps);
  if (leads()) {
    shared_.outputs->write_log(spread_);
    if (shared_.observer.on_spread) shared_.observer.on_spread(spread_);
  }
  spread_ = {};
}

TrainerHooks RankRun::hooks() {
  TrainerHooks hooks;
  if (const auto& flip = shared_.request.flip; flip && flip->rank == rank_.index()) {
    flip_.emplace(*flip, *witness_);
    flip_->add_to(hooks);
  }
  hooks.after_sums = [this, before = hooks.after_sums] {
    if (before) before();
    speak();
  };
  const auto& straggler = shared_.request.straggler;
  if (straggler && straggler->rank == rank_.index()) hooks.slowdown = straggler->factor;
  const auto& death = shared_.request.death;
  if (!death || death->rank != rank_.index()) return hooks;
  hooks.before_instruction = [this, at = *death](std::int64_t step, const Instruction& i) {
    const auto die = [] { std::raise(SIGKILL); };
    if (step != at.step) return;
    const bool forward = i.op == Op::F, backward = i.op == Op::B || i.op == Op::BW;
    if ((forward && at.where == "forward") || (backward && at.where == "backward")) die();
    if (const auto dash = at.where.find("-collective"); dash != std::string::npos)
      shared_.request.run.processes->set_watch(at.where.substr(0, dash), die);
  };
  return hooks;
}

void RankRun::summarize() {
  summary_.measured_memory = rank_.arena().peak();
  summary_.graphs = trainer_.graph_counts();
  // The first and last steps of a stream differ from the others; together they are as many whole steps.
  if (!trainer_.flushes()) {
    summary_.measured_traffic = traffic_ / summary_.steps;
    summary_.measured_messages = messages_ / summary_.steps;
    summary_.measured_host.out = host_.out / summary_.steps;
    summary_.measured_host.back = host_.back / summary_.steps;
  }
  summary_.traffic_by_data = predicted_traffic(shared_, summary_.steps, decided_);
  summary_.step_seconds = median(step_seconds_);
  if (summary_.step_seconds > 0)
    summary_.tokens_per_second = static_cast<double>(step_tokens()) / summary_.step_seconds;
}

void RankRun::run_as_worker() {
  const AsynchronousRun run = asynchronous_run(shared_);
  const auto all = join_all(rank_, rank_.size(Axis::dp), run.options.servers);
  rank_.arena().reset_peak();
  Traffic before = rank_.traffic(), messages_before = rank_.messages();
  StepTrace trace(rank_);
  trace.begin(run.first_step + 1);
  run_worker(*all, trainer_, run, source(shared_.split.train, shared_.request.plan.seq_len), [&] {
    keep_run();
    trace.next();
    if (!leads()) return;
    summary_.measured_traffic = rank_.traffic() - std::exchange(before, rank_.traffic());
    summary_.measured_messages = rank_.messages() - std::exchange(messages_before, rank_.messages());
    count_offloaded();
  });
  trace.end();
  gather_shown_runs();
  evaluate(run.last_step - 1);
  if (leads()) summary_.measured_memory = rank_.arena().peak();
  all->barrier().wait();  // then the servers save
  all->barrier().wait();
  gather_traces();
  if (shared_.request.sample_tokens > 0) sample_text();
}

void RankRun::keep_run() {
  shown_runs_.push_back(trainer_.last_run());
  if (static_cast<int>(shown_runs_.size()) > shared_.pipeline->programs(0).shown_steps())
    shown_runs_.pop_front();
}

std::vector<Span> RankRun::shown_spans() const {
  std::vector<Span> spans;
  for (const PipelineRun& run : shown_runs_) {
    const std::vector<Span> more = run.spans_since(shared_.epoch);
    spans.insert(spans.end(), more.begin(), more.end());
  }
  return spans;
}

void RankRun::gather_traces() {
  if (!shared_.request.trace) return;
  auto all = gather_timelines(rank_, rank_timeline(rank_, "rank", shown_spans()));
  if (leads()) summary_.rank_timelines = std::move(all);
}

void RankRun::gather_shown_runs() {
  if (rank_.dp_cp().rank() != 0 || rank_.coordinate(Axis::tp) != 0) return;
  const HostGroup pipeline(rank_.along(Axis::pp));
  const auto timelines = pipeline.gather_records(shown_spans());
  const auto staleness = pipeline.gather_records(std::vector{max_staleness_});
  if (!leads()) return;
  summary_.measured_timeline.ranks = timelines;
  if (trainer_.flushes()) return;
  for (std::size_t i = 0; i < staleness.size(); ++i) summary_.measured_staleness[i] = staleness[i].front();
}

SampleSource RankRun::source(Range range, std::int64_t seq_len) const {
  return [sampler = Sampler(shared_.data, range, shared_.request.seed), seq_len](
             std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
    sampler.sample(step, sample, seq_len, tokens, targets);
  };
}

bool RankRun::fingerprints_after(std::int64_t step) const {
  return shared_.request.fingerprint_every > 0 && (step + 1) % shared_.request.fingerprint_every == 0;
}

bool RankRun::reruns_from(std::int64_t step) const {
  const std::int64_t every = shared_.request.check_every, rerun = shared_.request.rerun;
  const std::int64_t next = std::min((step / every + 1) * every, last_step_);
  return rerun < 0 || next - step <= rerun;
}

void RankRun::train_checked_step(std::int64_t step) {
  if (!check_->under_way() && reruns_from(step)) {
    check_->begin(step);
    unchecked_.clear();
  }
  if (!check_->under_way()) return train_step(step);
  check_->begin_step(step);
  try {
    train_step(step);
    check_->end_step();
  } catch (const LastingError&) {
    // Where it is the data's fault, it is thrown again.
    check_->end_broken_step(std::current_exception());
    check_replicas(step + 1);
  }
}

StepResult RankRun::run_again(std::int64_t step) {
  if (flip_) flip_->begin_step(step + 1);
  return trainer_.step(step, source(shared_.split.train, shared_.request.plan.seq_len), 1).back();
}

void RankRun::check_replicas(std::int64_t end) {
  const auto begin = rank_.time().now();
  const Traffic before = rank_.traffic();
  const auto result = check_->check(end, [this](std::int64_t step) { return run_again(step); });
  if (leads() && result.corruption) publish_corruption(shared_, *result.corruption, summary_);
  if (result.corruption && !result.corruption->repaired) check_->end(*result.corruption);
  if (!leads()) return;
  summary_.checked_steps += std::ssize(result.steps);
  summary_.checked_traffic += rank_.traffic() - before;
  // What was published of a step, if anything was, is not what it gives when it runs undisturbed.
  const auto equal = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  const auto same = [&](std::size_t i) {
    return i < unchecked_.size() && equal(unchecked_[i].loss, result.steps[i].loss) &&
           equal(unchecked_[i].gradient_norm, result.steps[i].gradient_norm);
  };
  const double seconds_here = seconds_between(begin, rank_.time().now());
  summary_.check_seconds += seconds_here;
  std::size_t first = 0;
  while (first < result.steps.size() && same(first)) ++first;
  for (std::size_t i = first; i < result.steps.size(); ++i) {
    const double seconds = seconds_here / static_cast<double>(result.steps.size());
    if (i >= unchecked_.size()) {
      step_seconds_.push_back(seconds);  // it ended in an error
      report(result.steps[i]);
    } else {
      publish_again(shared_, record_of(result.steps[i], step_tokens(), seconds), summary_);
    }
  }
}

void RankRun::refuse_idle_flip() const {
  if (!flip_ || flip_->struck()) return;
  const PlantedFlip& flip = *shared_.request.flip;
  if (flip.step <= shared_.start.first_step || flip.step > last_step_) return;
  const std::string asked = text_of(flip);
  if (flip.where != FlipWhere::messages)
    refuse("{}: rank {} has no {}, and nothing was changed", asked, flip.rank, name_of(flip.where));
  refuse("{}: rank {} sent {} bits from that step on, and nothing was changed; legal: a smaller number",
         asked, flip.rank, witness_->bits_sent());
}

bool RankRun::saves_after(std::int64_t step) const {
  return shared_.request.save_every > 0 && (step + 1) % shared_.request.save_every == 0;
}

void RankRun::train_step(std::int64_t step) {
  const Traffic before = rank_.traffic(), messages_before = rank_.messages();
  const auto begin = rank_.time().now();
  const double waited = rank_.waited_seconds();
  StepTrace trace(rank_);
  // Those of a step that was taken back, or run twice to check it.
  (void)trainer_.take_offloaded();
  (void)trainer_.take_decided();
  trace.begin(step + 1);
  if (flip_) flip_->begin_step(step + 1);
  if (witness_ != nullptr && !check_) witness_->begin_step(step + 1);
  const auto results = trainer_.step(step, source(shared_.split.train, shared_.request.plan.seq_len),
                                     steps_until_empty(shared_, step, last_step_));
  if (witness_ != nullptr && !check_) {
    witness_->end_step();
    witness_->take_log();
  }
  trace.end();
  step_work_ = seconds_between(begin, rank_.time().now()) - (rank_.waited_seconds() - waited);
  keep_run();
  max_staleness_ = std::max(max_staleness_, trainer_.last_run().max_staleness);
  if (!leads()) return;
  step_seconds_.push_back(seconds_between(begin, rank_.time().now()));
  const bool updated = results.empty() || results.back().skipped.empty();
  if (updated) {
    summary_.measured_traffic = rank_.traffic() - before;
    summary_.measured_messages = rank_.messages() - messages_before;
    traffic_ += summary_.measured_traffic;
    messages_ += summary_.measured_messages;
    count_offloaded();
    const DecidedByData decided = trainer_.take_decided();
    if (trainer_.flushes())
      decided_ = decided;
    else
      decided_.copies += decided.copies;
  }
  if (trainer_.parameters().gathers()) summary_.gathers = trainer_.parameters().gather()->measures();
  if (check_) unchecked_.insert(unchecked_.end(), results.begin(), results.end());
  for (const StepResult& result : results) report(result);
}

// Of a step what moved in it, and of the run the most that lay there.
void RankRun::count_offloaded() {
  const HostActivations moved = trainer_.take_offloaded();
  host_.out += moved.out;
  host_.back += moved.back;
  host_.most = std::max(host_.most, moved.most);
  summary_.measured_host = {moved.out, moved.back, host_.most};
}

void RankRun::report(const StepResult& result) {
  summary_.taken_back += result.taken_back;
  summary_.skipped += !result.skipped.empty();
  publish(shared_,
          record_of(result, step_tokens(),
                    step_seconds_[static_cast<std::size_t>(result.step - shared_.start.first_step)]),
          summary_);
}

void RankRun::evaluate(std::int64_t step) {
  const Range held_out = shared_.split.validation;
  if (held_out.size() == 0) return;
  const Doing doing = rank_.doing(Activity::validation);
  const std::int64_t seq_len = shared_.request.plan.seq_len;
  const Sampler sampler(shared_.data, held_out, shared_.request.seed);
  const std::vector<std::int64_t> windows = sampler.windows(seq_len, shared_.request.eval_samples);
  if (windows.empty()) return;
  // Which the step before it has left: a run holds no more than a step.
  if (ends_with_step()) trainer_.parameters().drop_gradients();
  const double loss =
      trainer_.evaluate(std::ssize(windows),
                        [&](std::int64_t, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
                          sampler.window(windows[static_cast<std::size_t>(sample)], seq_len, tokens, targets);
                        });
  if (!leads()) return;
  summary_.validation_loss = loss;
  shared_.outputs->write_log(Evaluation{step + 1, loss});
  if (shared_.observer.on_evaluation) shared_.observer.on_evaluation(step + 1, loss);
}

void RankRun::save(std::int64_t step) {
  if (shared_.request.checkpoint_directory.empty()) return;
  const auto begin = rank_.time().now();
  finish_save();  // the one before
  const CheckpointInfo info = checkpoint_info(shared_, step + 1, trainer_.updates(step + 1),
                                              (step + 1 - shared_.start.first_step) * step_tokens());
  saved_step_ = step + 1;
  {
    const Doing doing = rank_.doing(Activity::checkpoint_copy);
    writer_.start(trainer_.parameters(), info, trainer_.carried(), trainer_.stages().router_biases());
  }
  if (!shared_.request.save_beside) finish_save();
  summary_.checkpoint_seconds =
      std::max(summary_.checkpoint_seconds, seconds_between(begin, rank_.time().now()));
}

void RankRun::commit() {
  const auto begin = rank_.time().now();
  const Doing doing = rank_.doing(Activity::checkpoint_commit);
  const std::string path = writer_.commit(shared_.request.keep);
  summary_.checkpoint_seconds =
      std::max(summary_.checkpoint_seconds, seconds_between(begin, rank_.time().now()));
  if (leads()) publish_checkpoint(shared_, saved_step_, path, summary_);
}

void RankRun::finish_save() {
  if (!writer_.under_way()) return;
  {
    const Doing doing = rank_.doing(Activity::checkpoint_wait);
    writer_.wait();
    meeting_.wait_for_all();
  }
  commit();
  // The next one may have the same files' names: only when the last is whole.
  const Doing doing = rank_.doing(Activity::meet);
  meeting_.wait_for_all();
}

void RankRun::sample_text() {
  const Range range = shared_.split.validation.size() > 0 ? shared_.split.validation : shared_.split.train;
  const std::vector<std::int32_t> prompt =
      sample_prompt(shared_.data, range, shared_.request.sampled_text().prompt);
  GenerateOptions options = shared_.request.generate;
  options.max_tokens = shared_.request.sample_tokens;
  if (ends_with_step()) trainer_.parameters().drop_gradients();
  const Arena::PoolUse pool(rank_.arena(), trainer_.pool_between_steps());
  std::vector<std::int32_t> text;
  try {
    text = generate(rank_, shared_.request.plan, trainer_.parameters(), trainer_.stages().router_biases(),
                    prompt, options);
  } catch (const NotFinite& error) {  // the last update's doing, and not what was asked for
    fail_for_good("after the last step: {}", error.what());
  }
  if (leads() && shared_.observer.on_sample) shared_.observer.on_sample(prompt, text);
}

}  // namespace echelon
