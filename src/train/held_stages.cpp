#include "train/held_stages.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace echelon {
namespace {

// One training step's state: what is kept for each (stage, microbatch) in flight.
class TrainingStages : public PipelineStages {
 public:
  TrainingStages(const std::vector<int>& ids, const std::vector<Stage>& held,
                 const std::vector<Microbatch>& microbatches, double gradient_scale,
                 std::function<Tensor(std::int64_t rows)> make_room,
                 const std::function<void(int group)>& group_done)
      : ids_(ids),
        held_(held),
        microbatches_(microbatches),
        gradient_scale_(gradient_scale),
        make_room_(std::move(make_room)),
        group_done_(group_done) {}

  Tensor forward(int stage, int microbatch, Tensor input) override {
    return at(stage).forward(of(microbatch), std::move(input), saved_[{stage, microbatch}]);
  }
  Tensor backward(int stage, int microbatch, Tensor gradient) override {
    auto saved = saved_.extract({stage, microbatch});
    return add_loss(at(stage).backward(of(microbatch), std::move(gradient), gradient_scale_, saved.mapped(),
                                       counted(stage)));
  }
  Tensor backward_input(int stage, int microbatch, Tensor gradient) override {
    return add_loss(at(stage).backward_input(of(microbatch), std::move(gradient), gradient_scale_,
                                             saved_.at({stage, microbatch}), counted(stage)));
  }
  void backward_weight(int stage, int microbatch) override {
    auto saved = saved_.extract({stage, microbatch});
    at(stage).backward_weight(of(microbatch), saved.mapped(), counted(stage));
  }
  Tensor make_boundary(int microbatch) override { return make_room_(of(microbatch).rows()); }

  double loss_sum() const { return loss_sum_; }
  // Microbatches that this rank runs of each stage, counted from the schedule: all of them, or one direction
  // of DualPipe.
  void expect(int stage, int count) { expected_[stage] = count; }

 private:
  const Stage& at(int stage) const {
    return held_[static_cast<std::size_t>(std::find(ids_.begin(), ids_.end(), stage) - ids_.begin())];
  }
  const Microbatch& of(int microbatch) const { return microbatches_[static_cast<std::size_t>(microbatch)]; }
  Tensor add_loss(Stage::Backward backward) {
    loss_sum_ += backward.loss_sum;
    return std::move(backward.dx);
  }
  Stage::GroupDone counted(int stage) {
    return [this, stage](int group) {
      if (++done_[group] == expected_[stage]) group_done_(group);
    };
  }

  const std::vector<int>& ids_;
  const std::vector<Stage>& held_;
  const std::vector<Microbatch>& microbatches_;
  double gradient_scale_;
  std::function<Tensor(std::int64_t)> make_room_;
  const std::function<void(int)>& group_done_;
  std::map<std::pair<int, int>, Stage::Saved> saved_;
  std::map<int, int> done_, expected_;
  double loss_sum_ = 0;
};

}  // namespace

HeldStages::HeldStages(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline,
                       const ParameterStore& parameters, const Faults& faults)
    : rank_(&rank),
      hidden_(plan.model.hidden),
      tensor_parallel_(rank, plan.sequence_parallel),
      ids_(pipeline.stages_of(rank.coordinate(Axis::pp))) {
  int group = 0;
  for (int id : ids_) {
    const StageSlice& slice = pipeline.slices()[static_cast<std::size_t>(id)];
    held_.emplace_back(rank, plan, parameters, slice, group, faults);
    group += static_cast<int>(slice.layers.size()) + slice.embedding + slice.head;
  }
  for (int s = 0; s < static_cast<int>(pipeline.slices().size()); ++s)
    for (int r = 0; r < rank.size(Axis::pp) && static_cast<int>(runner_.size()) == s; ++r) {
      const std::vector<int>& stages = pipeline.stages_of(r);
      if (std::find(stages.begin(), stages.end(), s) != stages.end()) runner_.push_back(r);
    }
}

Tensor HeldStages::make_boundary(std::int64_t rows) const {
  return rank_->activation({tensor_parallel_.rows_here(rows).size(), hidden_});
}

HeldStages::StepResult HeldStages::run_step(const Schedule& lowered,
                                            const std::vector<Microbatch>& microbatches,
                                            double gradient_scale,
                                            const std::function<void(int group)>& group_done) const {
  TrainingStages stages(
      ids_, held_, microbatches, gradient_scale, [this](std::int64_t rows) { return make_boundary(rows); },
      group_done);
  std::map<int, int> runs;
  for (const Instruction& i : lowered.ranks[static_cast<std::size_t>(rank_->coordinate(Axis::pp))])
    if (i.op == Op::F) ++runs[i.stage];
  for (const auto& [stage, count] : runs) stages.expect(stage, count);
  StepResult result;
  result.run = run_pipeline(rank_->along(Axis::pp), lowered, stages);
  result.loss_sum = stages.loss_sum();
  return result;
}

Tensor HeldStages::pass(std::int64_t rows,
                        const std::function<Tensor(std::size_t held, Tensor input)>& run) const {
  Communicator& group = rank_->along(Axis::pp);
  Tensor x;
  for (std::size_t s = 0; s < runner_.size(); ++s) {
    if (runner_[s] != group.rank()) continue;
    if (s > 0 && runner_[s - 1] != group.rank()) {
      x = make_boundary(rows);
      group.recv(x, runner_[s - 1]).wait();
    }
    const auto held =
        static_cast<std::size_t>(std::find(ids_.begin(), ids_.end(), static_cast<int>(s)) - ids_.begin());
    x = run(held, std::move(x));
    if (s + 1 < runner_.size() && runner_[s + 1] != group.rank())
      group.send(std::exchange(x, {}), runner_[s + 1]).wait();
  }
  return x;
}

double HeldStages::evaluate(const Microbatch& microbatch) const {
  const Tensor out = pass(microbatch.rows(), [&](std::size_t held, Tensor input) {
    return held_[held].evaluate(microbatch, std::move(input));
  });
  return out.defined() ? held_.back().loss(microbatch, out) : 0.0;
}

HeldStages::Caches HeldStages::make_caches(std::int64_t max_positions) const {
  Caches caches;
  for (const Stage& stage : held_) caches.push_back(stage.make_caches(max_positions));
  return caches;
}

Tensor HeldStages::next_logits(const Tensor& tokens, std::int64_t position, const Caches& caches) const {
  const Tensor out = pass(tokens.numel(), [&](std::size_t held, Tensor input) {
    return held_[held].forward_cached(tokens, std::move(input), position, caches[held]);
  });
  return out.defined() ? held_.back().logits(out) : Tensor();
}

}  // namespace echelon
