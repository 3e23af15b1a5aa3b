#include "train/step_driver.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/halving_tree.h"
#include "tensor/host.h"

namespace echelon {

StepDriver::StepDriver(TrainingParts& parts)
    : parts_(parts),
      executor_(parts.rank.along(Axis::pp), parts.rank.time(), parts.rank.device_clock()),
      pauses_(interleaves_pairs(parts.plan)),
      microbatches_(parts.programs.microbatches()) {
  if (parts_.stages.has_last_stage()) {
    const bool each = parts_.plan.numerics == Numerics::invariant;
    loss_sum_ = Tensor(parts_.rank.arena(), MemoryCategory::other, DType::f64,
                       {each ? dp_samples(parts_.plan, parts_.rank.coordinate(Axis::dp)).size() : 1});
    copy_from_host(std::vector<double>(static_cast<std::size_t>(loss_sum_.numel())), loss_sum_);
    if (parts_.plan.model.num_mtp_layers > 0) {
      next_loss_sum_ = Tensor(parts_.rank.arena(), MemoryCategory::other, DType::f64, loss_sum_.shape());
      copy_from_host(std::vector<double>(static_cast<std::size_t>(next_loss_sum_.numel())), next_loss_sum_);
    }
  }
  // Counted from the schedule: a rank runs all microbatches of its stages, or one direction of DualPipe.
  const StepPrograms& programs = parts_.programs;
  const int steps = programs.shown_steps(), updates = steps * programs.updates_per_step();
  std::map<int, int> runs;
  for (const Instruction& i :
       programs.schedule().ranks[static_cast<std::size_t>(parts_.rank.coordinate(Axis::pp))])
    if (i.op == Op::F)
      ++runs[i.stage];
    else if (i.op == Op::V)
      ++head_passes_;
  for (const auto& [stage, count] : runs) {
    expected_[stage] = count / updates;
    passes_ += count / steps;
  }
  head_passes_ /= steps;
  passes_ += head_passes_;
}

void StepDriver::begin(std::int64_t first_step, const SampleSource& samples) {
  first_step_ = first_step;
  samples_ = &samples;
}

void StepDriver::replay_passes() {
  check(parts_.rank.mesh().num_ranks() == 1 && !parts_.hooks.after_forward,
        "a graph is of passes that nobody looks into");
  parts_.parameters.keep_gradients();
  graphs_ = std::make_unique<PassGraphs>(parts_.rank, parts_.stages.stage(0));
}

void StepDriver::run(const StepPrograms::Program& program) {
  last_run_ = executor_.run(program, *this);
  const Rank& rank = parts_.rank;
  rank.at(fmt::format("step {}, after its passes", first_step_ + stream_step_ + 1));
  if (parts_.hooks.slowdown <= 1) return;
  double seconds = 0;
  for (const Span& span : last_run().spans) seconds += span.end - span.begin;
  const Doing doing = rank.doing(Activity::straggle);
  rank.time().sleep(std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>((parts_.hooks.slowdown - 1) * seconds)));
}

const PipelineRun& StepDriver::last_run() const {
  if (DeviceClock* const clock = parts_.rank.device_clock()) last_run_.settle(*clock);
  return last_run_;
}

void StepDriver::before(const Instruction& i) {
  const std::int64_t step = first_step_ + stream_step_ + 1;
  parts_.rank.at(fmt::format("step {}, {}", step, to_string(i)));
  if (parts_.hooks.before_instruction) parts_.hooks.before_instruction(step, i);
}

void StepDriver::upcoming(const Instruction* next) {
  next_backward_.reset();
  if (next == nullptr || (next->op != Op::B && next->op != Op::BW)) return;
  next_backward_ = {next->stage, next->microbatch};
}

void StepDriver::expect_next() {
  if (!next_backward_) return;
  if (const auto found = saved_.find(*next_backward_); found != saved_.end())
    parts_.stages.stage(next_backward_->first).expect_backward(found->second);
}

// What cannot be read is asked for again, and found out, when its step begins: this step is not its victim.
void StepDriver::read_ahead(int step) {
  const Rank& rank = parts_.rank;
  if (rank.arena().device() != Device::cuda) return;
  const Doing doing = rank.doing(Activity::load_data);
  ahead_ = {.step = first_step_ + step};
  try {
    for (const Range& range : microbatches(parts_.plan, rank.coordinate(Axis::dp)))
      for (std::int64_t sample = range.begin; sample < range.end; ++sample) {
        Sample read(parts_.plan.seq_len);
        (*samples_)(ahead_.step, sample, read.tokens.data(), read.targets.data());
        ahead_.samples.emplace(sample, std::move(read));
      }
  } catch (const std::exception&) {
    ahead_ = {};
  }
}

SampleSource StepDriver::samples() const {
  return [this](std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
    const auto read = ahead_.samples.find(sample);
    if (step != ahead_.step || read == ahead_.samples.end())
      return (*samples_)(step, sample, tokens, targets);
    std::copy(read->second.tokens.begin(), read->second.tokens.end(), tokens);
    std::copy(read->second.targets.begin(), read->second.targets.end(), targets);
  };
}

// All microbatches of a step are loaded at once: the loss is the mean over the targets of the global batch
// that are not ignored, whatever the mesh or padding, so their number must be known before the first
// gradient. Where each microbatch has an optimizer step of its own, it is its own batch.
StepDriver::Batch StepDriver::load(int step) {
  const Rank& rank = parts_.rank;
  const Doing doing = rank.doing(Activity::load_data);
  Batch loaded;
  loaded.left = passes_;
  const auto updates = static_cast<std::size_t>(parts_.programs.updates_per_step());
  std::vector<double> num_targets(updates, 0.0);
  const std::vector<Range> ranges = microbatches(parts_.plan, rank.coordinate(Axis::dp));
  const int of_copy = std::max(static_cast<int>(ranges.size()) / parts_.pipeline->stage_copies(), 1);
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    loaded.microbatches.push_back(
        load_microbatch(rank, parts_.plan, first_step_ + step, ranges[m], samples()));
    loaded.microbatches.back().index = static_cast<int>(m) % of_copy;
    num_targets[updates == 1 ? 0 : m] += static_cast<double>(loaded.microbatches.back().num_targets);
  }
  ahead_ = {};
  if (parts_.sums != DataParallelSums::none) num_targets = HostGroup(rank.dp_cp()).sum(num_targets);
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    const double targets = num_targets[updates == 1 ? 0 : m];
    if (targets == 0) fail_for_good("step {}: a batch has no target tokens", first_step_ + step + 1);
    loaded.gradient_scale.push_back(parts_.hooks.faults.loss_scale / targets);
  }
  num_targets_[step] = std::accumulate(num_targets.begin(), num_targets.end(), 0.0);
  return loaded;
}

StepDriver::Batch& StepDriver::batch(int step) {
  const auto found = batches_.find(step);
  return found != batches_.end() ? found->second : batches_[step] = load(step);
}

const Microbatch& StepDriver::microbatch(int index) {
  return batch(index / microbatches_).microbatches[static_cast<std::size_t>(index % microbatches_)];
}

Loss StepDriver::loss(int index) {
  const Batch& of = batch(index / microbatches_);
  const auto place = static_cast<std::size_t>(index % microbatches_);
  const Microbatch& microbatch = of.microbatches[place];
  if (parts_.plan.numerics == Numerics::ordinary || !loss_sum_.defined())
    return {of.gradient_scale[place], loss_sum_, next_loss_sum_};
  const std::int64_t first =
      microbatch.first_sample - dp_samples(parts_.plan, parts_.rank.coordinate(Axis::dp)).begin;
  const auto here = [&](const Tensor& sum) {
    return sum.defined() ? sum.flat_range(first, first + microbatch.sequences.batch) : sum;
  };
  return {of.gradient_scale[place], here(loss_sum_), here(next_loss_sum_)};
}

void StepDriver::release(int index) {
  const auto found = batches_.find(index / microbatches_);
  if (--found->second.left == 0) batches_.erase(found);
}

Work<Tensor> StepDriver::pass(Instruction i, Tensor input) {
  before_pass(i);
  if (graphs_) {
    pass_by_graph(i);
    co_return Tensor();
  }
  const Stage& stage = parts_.stages.stage(i.stage);
  const std::pair place{i.stage, i.microbatch};
  if (i.op == Op::F) {
    expect_next();
    Tensor output = co_await stage.forward(microbatch(i.microbatch), std::move(input), saved_[place],
                                           next_backward_ == place);
    if (parts_.hooks.after_forward) parts_.hooks.after_forward(saved_[place]);
    co_return std::move(output);
  }
  Tensor dx = co_await stage.backward(microbatch(i.microbatch), std::move(input), loss(i.microbatch),
                                      saved_.at(place), i.op == Op::BW ? Weights::now : Weights::deferred,
                                      counted(expected_[i.stage]), [this] { expect_next(); });
  if (i.op == Op::BW) {
    saved_.erase(place);
    release(i.microbatch);
  }
  co_return std::move(dx);
}

void StepDriver::pass_by_graph(const Instruction& i) {
  if (i.op == Op::F) return graphs_->forward(microbatch(i.microbatch), loss(i.microbatch));
  for (int group : graphs_->backward()) counted(expected_[i.stage])(group);
  release(i.microbatch);
}

void StepDriver::backward_weight(const Instruction& i) {
  expect_next();
  auto saved = saved_.extract({i.stage, i.microbatch});
  parts_.stages.stage(i.stage).backward_weight(saved.mapped(), counted(expected_[i.stage]));
  release(i.microbatch);
}

void StepDriver::step(const Instruction&) {
  throw InvariantError("no stage steps by itself in a schedule that flushes");
}

bool StepDriver::validate() {
  throw InvariantError("no step is validated where the optimizer has its barrier");
}

Tensor StepDriver::make_room(ValueKind kind, int index) {
  const std::int64_t rows = microbatch(index).rows();
  const VocabularyParallel* const part = parts_.stages.vocabulary_part();
  switch (kind) {
    case ValueKind::head_gradient:
      return part->make_gradient(rows);
    case ValueKind::head_sums:
      return part->make_sums(rows);
    case ValueKind::head_scale:
      return part->make_scale(rows);
    default:
      return parts_.stages.make_boundary(rows);
  }
}

SequenceSums StepDriver::sums(int index) {
  const Microbatch& of = microbatch(index);
  return {parts_.parameters.sequence_tree(), parts_.rank.kernels(), of.index, of.sequences.batch, of.rows()};
}

VocabularyParallel::Part StepDriver::head_part(const Instruction& i, Tensor hidden) {
  expect_next();
  const auto used = parts_.parameters.use(parts_.parameters.output_group());
  return parts_.stages.vocabulary_part()->forward(hidden, microbatch(i.microbatch).targets,
                                                  head_saved_[i.microbatch]);
}

void StepDriver::head_part_weight(const Instruction& i, Tensor scale) {
  expect_next();
  parts_.parameters.need_output_gradient();
  const auto saved = head_saved_.extract(i.microbatch);
  parts_.stages.vocabulary_part()->backward_weight(saved.mapped(), scale, microbatch(i.microbatch).targets,
                                                   loss(i.microbatch).gradient_scale, sums(i.microbatch));
  counted(head_passes_)(parts_.parameters.output_group());
  release(i.microbatch);
}

VocabularyParallel::Whole StepDriver::merge_head(int index,
                                                 const std::vector<VocabularyParallel::Part>& parts) {
  const Loss of = loss(index);
  return parts_.stages.vocabulary_part()->merge(parts, microbatch(index).targets, of.gradient_scale, of.sum,
                                                sums(index).runs());
}

Stage::GroupDone StepDriver::counted(int expected) {
  return [this, expected](int group) {
    if (++done_[group] < expected) return;
    done_[group] = 0;
    if (parts_.hooks.before_sum) parts_.hooks.before_sum(group);
    parts_.gradients.group_done(group);
  };
}

std::vector<double> StepDriver::take_loss_sums() {
  std::vector<double> sums(static_cast<std::size_t>(1 + parts_.plan.model.num_mtp_layers));
  const auto take = [](const Tensor& sum) {
    const std::vector<double> losses = copy_to_host(sum, 0.0);
    copy_from_host(std::vector<double>(losses.size()), sum);
    return halving_sum(losses, 0, std::ssize(losses));
  };
  if (loss_sum_.defined()) sums.front() = take(loss_sum_);
  if (next_loss_sum_.defined()) sums.back() = take(next_loss_sum_);
  return sums;
}

static void set_losses(const std::vector<double>& sums, double num_targets, StepResult& result) {
  result.loss = sums.front() / num_targets;
  if (sums.size() > 1) result.mtp_loss = sums.back() / num_targets;
}

void StepDriver::refuse_step(std::int64_t step, double loss) const {
  fail_for_good("step {}: {} (learning rate {}); nothing was updated", step + 1,
                parts_.gradients.first_nonfinite(loss), learning_rate(parts_.optimizer, step));
}

LateResult::LateResult(const TrainingParts& parts, std::int64_t step, std::vector<double> loss_sums,
                       double num_targets)
    : result{step, 0, std::nan(""), learning_rate(parts.optimizer, step)}, num_targets_(num_targets) {
  loss_sums = HostGroup(parts.rank.dp_cp()).sum(loss_sums);
  loss_sums_ = HostGroup(parts.rank.along(Axis::pp)).begin_sum(loss_sums);
}

StepResult LateResult::finish() {
  set_losses(loss_sums_.get(), num_targets_, result);
  return result;
}

}  // namespace echelon
