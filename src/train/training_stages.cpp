#include "train/training_stages.h"

#include "base/error.h"
#include "tensor/host.h"

namespace echelon {

TrainingStages::TrainingStages(const HeldStages& held, const StepPrograms& programs, int pp_rank, bool pauses,
                               Hooks hooks)
    : held_(held), pauses_(pauses), hooks_(std::move(hooks)), microbatches_(programs.microbatches()) {
  // Counted from the schedule: a rank runs all microbatches of its stages, or one direction of DualPipe.
  const int steps = programs.shown_steps(), updates = steps * programs.updates_per_step();
  if (held_.has_last_stage()) {
    loss_sum_ = Tensor(held_.rank().arena(), MemoryCategory::other, DType::f64, {1});
    copy_from_host(std::vector<double>{0}, loss_sum_);
  }
  std::map<int, int> runs;
  for (const Instruction& i : programs.schedule().ranks[static_cast<std::size_t>(pp_rank)])
    if (i.op == Op::F) ++runs[i.stage];
  for (const auto& [stage, count] : runs) {
    expected_[stage] = count / updates;
    passes_ += count / steps;
  }
}

double TrainingStages::take_loss_sum() {
  if (!loss_sum_.defined()) return 0;
  const double loss = copy_to_host(loss_sum_, 0.0).front();
  copy_from_host(std::vector<double>{0}, loss_sum_);
  return loss;
}

TrainingStages::Loaded& TrainingStages::batch(int step) {
  const auto found = loaded_.find(step);
  if (found != loaded_.end()) return found->second;
  return loaded_[step] = {hooks_.load(step), passes_};
}

const Microbatch& TrainingStages::microbatch(int index) {
  return batch(index / microbatches_).batch.microbatches[static_cast<std::size_t>(index % microbatches_)];
}

Loss TrainingStages::loss(int index) {
  const StepBatch& of = batch(index / microbatches_).batch;
  return {of.gradient_scale[static_cast<std::size_t>(index % microbatches_)], loss_sum_};
}

void TrainingStages::release(int index) {
  const auto found = loaded_.find(index / microbatches_);
  if (--found->second.left == 0) loaded_.erase(found);
}

Work<Tensor> TrainingStages::forward(Instruction i, Tensor input) {
  hooks_.before_pass(i);
  co_return co_await held_.stage(i.stage).forward(microbatch(i.microbatch), std::move(input),
                                                  saved_[{i.stage, i.microbatch}]);
}

Work<Tensor> TrainingStages::backward(Instruction i, Tensor gradient) {
  hooks_.before_pass(i);
  auto saved = saved_.extract({i.stage, i.microbatch});
  Tensor dx = co_await held_.stage(i.stage).backward(microbatch(i.microbatch), std::move(gradient),
                                                     loss(i.microbatch), saved.mapped(), Weights::now,
                                                     counted(i.stage));
  release(i.microbatch);
  co_return std::move(dx);
}

Work<Tensor> TrainingStages::backward_input(Instruction i, Tensor gradient) {
  hooks_.before_pass(i);
  co_return co_await held_.stage(i.stage).backward(microbatch(i.microbatch), std::move(gradient),
                                                   loss(i.microbatch), saved_.at({i.stage, i.microbatch}),
                                                   Weights::deferred, counted(i.stage));
}

void TrainingStages::backward_weight(const Instruction& i) {
  auto saved = saved_.extract({i.stage, i.microbatch});
  held_.stage(i.stage).backward_weight(saved.mapped(), counted(i.stage));
  release(i.microbatch);
}

bool TrainingStages::validate() {
  if (hooks_.validate()) return true;
  saved_.clear();
  return false;
}

Tensor TrainingStages::make_boundary(int index) { return held_.make_boundary(microbatch(index).rows()); }

Stage::GroupDone TrainingStages::counted(int stage) {
  return [this, stage](int group) {
    if (++done_[group] < expected_[stage]) return;
    done_[group] = 0;
    hooks_.group_done(group);
  };
}

}  // namespace echelon
