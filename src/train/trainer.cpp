#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "parallel/sequence_parallel.h"
#include "schedule/group_uses.h"
#include "schedule/simulate.h"

namespace echelon {

void refuse_clipping(const OptimizerOptions& optimizer, const PipelineLayout& pipeline) {
  const StepPrograms& programs = pipeline.programs(0);
  if (!programs.flushes() && optimizer.clip > 0)
    refuse(
        "--clip {}: {} steps each stage by itself, before the gradient norm over all stages is known; legal: "
        "0",
        optimizer.clip, programs.schedule().name);
}

Trainer::Trainer(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer, std::uint64_t seed,
                 const Faults& faults, std::shared_ptr<const PipelineLayout> pipeline, Moments moments)
    : rank_(rank),
      plan_(plan),
      optimizer_(optimizer),
      faults_(faults),
      pipeline_(pipeline ? std::move(pipeline) : std::make_shared<PipelineLayout>(plan)),
      programs_(pipeline_->programs(rank.coordinate(Axis::dp))),
      parameters_(rank, plan, *pipeline_, seed, faults, moments),
      reducer_(DataParallel::groups(rank, plan), rank.kernels(), rank.arena(), rank.precision().gradients,
               plan.compression, seed, parameters_.gradient_buckets()),
      stages_(rank_, plan_, *pipeline_, parameters_, faults),
      training_(stages_, programs_, rank.coordinate(Axis::pp), interleaves_pairs(plan), hooks()),
      executor_(
          rank.along(Axis::pp),
          [this](const Instruction& i) {
            const std::int64_t at = first_step_ + stream_step_ + 1;
            rank_.at(fmt::format("step {}, {}", at, to_string(i)));
            if (watch_) watch_(at, i);
          },
          rank.time()),
      late_groups_(pipeline_->late_groups(rank.coordinate(Axis::pp))) {
  const int pp_rank = rank.coordinate(Axis::pp);
  if (!flushes())
    versions_.emplace(rank_, parameters_.values(),
                      weight_versions(programs_.schedule())[static_cast<std::size_t>(pp_rank)]);
  if (!plan_.optimizer_barrier) optimistic_.emplace(rank_, parameters_);
}

TrainingStages::Hooks Trainer::hooks() {
  return {[this](int step) { return load_step(step); }, [this](const Instruction& i) { before_pass(i); },
          [this](int group) {
            if (!late_groups_.contains(group)) finish_group(group);
          },
          [this](const Instruction& i) { update(i); }, [this] { return validate(); }};
}

// All microbatches of a step are loaded at once: the loss is the mean over the targets of the global batch
// that are not ignored, whatever the mesh or padding, so their number must be known before the first
// gradient. Where each microbatch has an optimizer step of its own, it is its own batch.
StepBatch Trainer::load_step(int step) {
  const Doing doing = rank_.doing(Activity::load_data);
  StepBatch batch;
  const auto updates = static_cast<std::size_t>(programs_.updates_per_step());
  std::vector<double> num_targets(updates, 0.0);
  const std::vector<Range> ranges = microbatches(plan_, rank_.coordinate(Axis::dp));
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    batch.microbatches.push_back(load_microbatch(rank_, plan_, first_step_ + step, ranges[m], *samples_));
    num_targets[updates == 1 ? 0 : m] += static_cast<double>(batch.microbatches.back().num_targets);
  }
  if (sums_ != DataParallelSums::none) num_targets = sum_over({&rank_.dp_cp()}, num_targets);
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    const double targets = num_targets[updates == 1 ? 0 : m];
    if (targets == 0) fail_for_good("step {}: a batch has no target tokens", first_step_ + step + 1);
    batch.gradient_scale.push_back(faults_.loss_scale / targets);
  }
  num_targets_[step] = std::accumulate(num_targets.begin(), num_targets.end(), 0.0);
  return batch;
}

void Trainer::begin_update() {
  parameters_.begin_gradients();
  const bool reduces = sums_ == DataParallelSums::all;
  reduction_.emplace(rank_, parameters_.shards(), reducer_, updates(first_step_) + stream_updates_,
                     reduces ? parameters_.bucket_tensors() : std::vector<BucketTensors>());
}

void Trainer::run(const StepPrograms::Program& program) {
  last_run_ = executor_.run(program, training_);
  rank_.at(fmt::format("step {}, after its passes", first_step_ + stream_step_ + 1));
  if (slowdown_ <= 1) return;
  double seconds = 0;
  for (const Span& span : last_run_.spans) seconds += span.end - span.begin;
  const Doing doing = rank_.doing(Activity::straggle);
  rank_.time().sleep(
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>((slowdown_ - 1) * seconds)));
}

void Trainer::before_pass(const Instruction& i) {
  if (!versions_) return;
  versions_->use(i.version);
  if (i.op == Op::F) return versions_->keep(i.version);
  versions_->drop(i.version);
  if (!reduction_) begin_update();
}

// Ranks that share a key/value head each saw their own query heads only, so its gradient is the sum over
// them.
void Trainer::finish_group(int group) {
  const int tp = rank_.size(Axis::tp);
  if (faults_.narrow_gradients)
    for (const Parameter& p : parameters_.all())
      if (p.group == group) {
        const Tensor narrow(rank_.arena(), MemoryCategory::other, DType::bf16, p.gradient.shape());
        rank_.kernels().copy(p.gradient, narrow);
        rank_.kernels().copy(narrow, p.gradient);
      }
  for (const Parameter& p : parameters_.all()) {
    const int replicas = tp_replicas(p.spec, tp);
    if (p.group == group && p.spec.shard_dim >= 0 && replicas > 1)
      rank_.tp_replicas(replicas).all_reduce(p.gradient).wait();
  }
  for (const Range& range : parameters_.gradient_ranges(group)) reduction_->ready(range);
}

// Every group is finished: what is left is what each tp rank holds whole.
void Trainer::finish_reduction() {
  if (!plan_.shards_sequence())
    reduce_partial_gradients(rank_, parameters_.partial_gradients());
  else if (!faults_.forget_norm_reduction)
    reduce_partial_gradients(rank_, parameters_.whole_gradients());
  reduction_->finish();
  reduction_.reset();
}

// A parameter that two pipeline ranks hold (both ends of a tied embedding, both copies of a DualPipe stage)
// has a part of its gradient on each. Each rank adds the other's part to its own; a sum of two has one order.
void Trainer::add_pipeline_copies() {
  Communicator& group = rank_.along(Axis::pp);
  for (const ParamSpec& spec : parameters_.model()) {
    const Parameter* p = parameters_.find_here(spec.name);
    if (p == nullptr || p->holders.size() < 2) continue;
    check(p->holders.size() == 2, "a parameter is on at most two pipeline ranks");
    const int other = p->holders[p->holders.front() == group.rank() ? 1 : 0];
    const Tensor theirs(rank_.arena(), MemoryCategory::communication, p->gradient.dtype(),
                        p->gradient.shape());
    Pending sent = group.send(p->gradient, other);
    group.recv(theirs, other).wait();
    sent.wait();
    rank_.kernels().add(theirs, p->gradient);
  }
}

double Trainer::compute_gradients(std::int64_t step, const SampleSource& samples) {
  check(flushes() && !optimistic_, "steps that run into each other are made by step()");
  samples_ = &samples;
  take_decided();
  first_step_ = step;
  begin_update();
  training_.prepare(0);
  stages_.begin_step();
  parameters_.begin_uses(group_uses(*pipeline_, programs_.program(0, 1), rank_.coordinate(Axis::pp)));
  run(programs_.program(0, 1));
  parameters_.end_uses();
  const double loss_sum = complete_gradients();
  if (sums_ == DataParallelSums::all) count_routing();
  if (sums_ == DataParallelSums::none) return loss_sum / num_targets();
  return sum_over({&rank_.dp_cp(), &rank_.along(Axis::pp)}, {loss_sum})[0] / num_targets();
}

// A layer's tokens are on all data-parallel ranks, and in DualPipe on two pipeline ranks. Losses alone are
// summed over tp: under sequence parallelism each rank has its own rows.
void Trainer::count_routing() {
  const std::int64_t experts = plan_.model.num_experts, dense = plan_.model.num_dense_layers,
                     layers = plan_.model.num_expert_layers(), width = routing_report_size(experts);
  if (layers == 0) return;
  const Doing doing = rank_.doing(Activity::count_routing);
  std::vector<double> losses(static_cast<std::size_t>(layers)), all(static_cast<std::size_t>(layers * width));
  const std::vector<RoutingCounts> here = stages_.take_routing_counts();
  for (const RoutingCounts& c : here) losses[static_cast<std::size_t>(c.layer - dense)] += c.loss_sum;
  if (plan_.shards_sequence()) losses = sum_over({&rank_.along(Axis::tp)}, losses);
  for (const RoutingCounts& c : here) {
    double* place = all.data() + (c.layer - dense) * width;
    for (std::size_t e = 0; e < c.routed.size(); ++e) {
      place[e] += c.routed[e];
      place[static_cast<std::size_t>(experts) + e] += c.dropped[e];
    }
    place[2 * experts] += c.away;
    place[width - 1] = losses[static_cast<std::size_t>(c.layer - dense)];
  }
  all = sum_over({&rank_.dp_cp(), &rank_.along(Axis::pp)}, all);
  routing_.clear();
  for (std::int64_t i = 0; i < layers; ++i) {
    const double* place = all.data() + i * width;
    routing_.push_back({dense + i,
                        {place, place + experts},
                        {place + experts, place + 2 * experts},
                        place[2 * experts],
                        place[width - 1] / static_cast<double>(plan_.global_batch * plan_.seq_len)});
  }
}

// What is left when the pipeline is empty. Returns this rank's summed loss.
double Trainer::complete_gradients() {
  const Doing doing = rank_.doing(Activity::reduce_gradients);
  parameters_.add_tied_gradient();
  add_pipeline_copies();
  for (int group : late_groups_) finish_group(group);
  finish_reduction();
  return training_.take_loss_sum();
}

std::vector<StepResult> Trainer::step(std::int64_t step, const SampleSource& samples,
                                      std::int64_t steps_left) {
  check(steps_left >= 1, "a step is one of those that are left");
  samples_ = &samples;
  take_decided();  // an evaluation's
  if (!flushes()) return stream_step(step, steps_left);
  if (optimistic_) return optimistic_step(step, steps_left);
  const double loss = compute_gradients(step, samples);
  const Applied applied = apply_gradients(step, loss);
  return {{step, loss, applied.gradient_norm, applied.learning_rate, applied.skipped, false, routing_}};
}

// No rank waits for another pipeline rank: their sum of the loss is asked for now and taken a step later.
Trainer::Unfinished Trainer::unfinished(std::int64_t step, double loss_sum, double num_targets) {
  Unfinished u;
  u.result = {step, 0, std::nan(""), learning_rate(optimizer_, step)};
  u.num_targets = num_targets;
  u.loss_sum = HostGroup(rank_.along(Axis::pp)).begin_sum(sum_over({&rank_.dp_cp()}, {loss_sum}));
  return u;
}

void Trainer::finish_result() {
  const double loss_sum = unfinished_->loss_sum.get()[0];
  finished_.push_back(unfinished_->result);
  finished_.back().loss = loss_sum / unfinished_->num_targets;
  unfinished_.reset();
}

std::vector<StepResult> Trainer::stream_step(std::int64_t step, std::int64_t steps_left) {
  if (stream_step_ == 0) {
    first_step_ = step;
    stream_updates_ = 0;
    versions_->restart();
  }
  check(first_step_ + stream_step_ == step, "a stream goes from step to step");
  constexpr std::int64_t far = 1 << 30;
  run(programs_.program(stream_step_, static_cast<int>(std::min(steps_left, far))));
  Unfinished now = unfinished(step, training_.take_loss_sum(), num_targets_.extract(stream_step_).mapped());
  if (unfinished_) finish_result();
  unfinished_ = std::move(now);
  ++stream_step_;
  if (steps_left == 1) {
    finish_result();
    stream_step_ = 0;
  }
  for (const StepResult& result : finished_)
    if (!std::isfinite(result.loss))
      fail_for_good("step {}: the loss is {} (learning rate {}); stages had stepped on by then",
                    result.step + 1, result.loss, result.learning_rate);
  return std::exchange(finished_, {});
}

std::vector<StepResult> Trainer::optimistic_step(std::int64_t step, std::int64_t steps_left) {
  first_step_ = step;
  training_.prepare(0);
  run(programs_.program(0, 1));  // validates the step before
  const double loss_sum = complete_gradients();
  unfinished_ = unfinished(step, loss_sum, num_targets_.at(0));
  std::vector<double> squares;
  {
    const Doing doing = rank_.doing(Activity::gradient_norm);
    squares = gradient_squares(rank_, parameters_);
  }
  // What this rank has counted is part of the norm: where that is too much, it knows that it must clip, and
  // waits.
  const double norm_here = norm_of_squares(squares);
  unfinished_->squares = HostGroup(rank_.along(Axis::pp)).begin_sum(squares);
  if (steps_left == 1)
    make_true_step();
  else if (std::isfinite(norm_here) && clip_factor(norm_here, optimizer_.clip) == 1)
    optimistic_->guess(optimizer_, unfinished_->result.learning_rate, updates(step));
  return std::exchange(finished_, {});
}

// The step whose result is still unknown, with all that is known now. Returns what the gradients were
// multiplied by.
double Trainer::make_true_step() {
  optimistic_->take_back();
  StepResult& result = unfinished_->result;
  result.gradient_norm = norm_of_squares(unfinished_->squares.get());
  if (!std::isfinite(result.gradient_norm)) refuse_step(result.step, result.learning_rate, 0);
  const double factor = clip_factor(result.gradient_norm, optimizer_.clip);
  adamw_step(rank_, parameters_, optimizer_, result.learning_rate, updates(result.step), factor);
  finish_result();
  return factor;
}

bool Trainer::validate() {
  bool right = true;
  if (unfinished_) {
    right = make_true_step() == 1 && !std::exchange(distrusts_guess_, false);
    finished_.back().taken_back = !right;
  }
  if (!reduction_) begin_update();
  return right;
}

// The step of one stage on what has been added up since its last one. Clipping would need the norm over all
// stages, and is refused with such a schedule.
void Trainer::update(const Instruction& i) {
  {
    const Doing doing = rank_.doing(Activity::reduce_gradients);
    finish_reduction();
  }
  ++stream_updates_;
  versions_->advance(i.version);
  const std::int64_t step = first_step_ + i.microbatch / programs_.microbatches();
  adamw_step(rank_, parameters_, optimizer_, learning_rate(optimizer_, step),
             updates(first_step_) + i.version, 1.0);
}

// All ranks agree on the first tensor, so that whichever is heard names the same one.
std::string Trainer::first_nonfinite(double loss) const {
  const auto& all = parameters_.model();
  std::size_t first = 0;
  const auto finite = [&](const ParamSpec& spec) {
    const Parameter* p = parameters_.find_here(spec.name);
    return p == nullptr || rank_.kernels().all_finite(p->own_gradient);
  };
  while (first < all.size() && finite(all[first])) ++first;
  auto left = static_cast<double>(all.size() - first);
  for (Axis axis : all_axes) left = HostGroup(rank_.along(axis)).max(left);
  const std::size_t named = all.size() - static_cast<std::size_t>(left);
  if (named < all.size()) return "the gradient of " + all[named].name + " is not finite";
  return std::isfinite(loss) ? "the gradient norm overflows" : "the loss is not finite";
}

void Trainer::refuse_step(std::int64_t step, double learning_rate, double loss) const {
  fail_for_good("step {}: {} (learning rate {}); nothing was updated", step + 1, first_nonfinite(loss),
                learning_rate);
}

Trainer::Applied Trainer::apply_gradients(std::int64_t step, double loss) {
  Applied applied;
  applied.gradient_norm = global_gradient_norm(rank_, parameters_);
  applied.learning_rate = learning_rate(optimizer_, step);
  if (!std::isfinite(applied.gradient_norm) || !std::isfinite(loss)) {
    if (!skips_nonfinite_) refuse_step(step, applied.learning_rate, loss);
    applied.skipped = first_nonfinite(loss);
    more_updates_ -= programs_.updates_per_step();
    return applied;
  }
  adamw_step(rank_, parameters_, optimizer_, applied.learning_rate, updates(step),
             clip_factor(applied.gradient_norm, optimizer_.clip));
  stages_.balance_routers(routing_);
  return applied;
}

double Trainer::evaluate(std::int64_t num_samples, const SampleSource& samples) {
  const Range mine = split_range(num_samples, rank_.size(Axis::dp), rank_.coordinate(Axis::dp));
  // As many sequences at once as training has, so that evaluation needs no more memory.
  const auto at_once = [&](int dp_rank) { return microbatches(plan_, dp_rank).front().size(); };
  const auto passes = [&](int dp_rank) {
    const std::int64_t count = split_range(num_samples, rank_.size(Axis::dp), dp_rank).size();
    return (count + at_once(dp_rank) - 1) / at_once(dp_rank);
  };
  std::int64_t last = passes(rank_.coordinate(Axis::dp));
  // Ranks that gather parameters or exchange tokens together go through as many passes.
  if (parameters_.gathers() || rank_.size(Axis::ep) > 1)
    for (int r = 0; r < rank_.size(Axis::dp); ++r) last = std::max(last, passes(r));
  const std::int64_t size = at_once(rank_.coordinate(Axis::dp));
  double loss_sum = 0, num_targets = 0;
  for (std::int64_t pass = 0; pass < last; ++pass) {
    const auto at = [&](std::int64_t p) { return std::min(mine.begin + p * size, mine.end); };
    const Microbatch microbatch = load_microbatch(rank_, plan_, 0, {at(pass), at(pass + 1)}, samples);
    num_targets += static_cast<double>(microbatch.num_targets);
    loss_sum += stages_.evaluate(microbatch);
  }
  num_targets = sum_over({&rank_.dp_cp()}, {num_targets})[0];
  return sum_over({&rank_.dp_cp(), &rank_.along(Axis::pp)}, {loss_sum})[0] / num_targets;
}

std::vector<double> Trainer::sum_over(std::initializer_list<Communicator*> groups,
                                      std::vector<double> values) const {
  for (Communicator* group : groups) values = HostGroup(*group).sum(values);
  return values;
}

}  // namespace echelon
