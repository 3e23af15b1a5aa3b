#include "model/block_runner.h"

#include <algorithm>
#include <utility>

#include "parallel/whole_rows.h"

namespace echelon {

static std::unique_ptr<BlockProgram> made(BlockProgram program, const Plan& plan) {
  if (plan.numerics == Numerics::invariant) join_losses(program);
  return std::make_unique<BlockProgram>(std::move(program));
}

BlockRunner::BlockRunner(BlockProgram program, const Rank& rank, const Plan& plan,
                         const ParameterStore& parameters, TensorParallel tensor_parallel,
                         const Faults& faults)
    : program_(made(std::move(program), plan)),
      passes_(block_passes(*program_, plan.recompute.of(rank.coordinate(Axis::pp)))),
      rank_(&rank),
      tensor_parallel_(tensor_parallel),
      tree_(parameters.sequence_tree()) {
  if (tree_ != nullptr)
    if (auto rows = std::make_shared<const WholeRows>(rank, plan); rows->are_cut()) spread_ = std::move(rows);
  OpSetting setting{rank, plan, parameters, tensor_parallel, {}, faults};
  if (const BlockOp* experts = program_->find(OpKind::experts_in))
    experts_ = setting.experts = make_experts(*experts, setting);
  // Generation predicts one token.
  if (program_->find(OpKind::attention) != nullptr && !program_->ends_in_loss())
    cache_width_ = 2 * heads_here(plan.model, tensor_parallel).kv_width();
  if (const BlockOp* op = program_->find(OpKind::state_space)) {
    scan_ = state_space_here(plan);
    tail_ = {op->weights.front().shape.back() - 1, scan_->mixed_width()};
  }
  if (const BlockOp* op = program_->find(OpKind::short_conv)) {
    const Tensor taps = parameters.weight(op->weights.front().name).value;
    tail_ = {taps.cols() - 1, 3 * taps.rows()};
  }
  for (const BlockOp& op : program_->ops) ops_.push_back(make_op(op, setting));
}

Work<void> BlockRunner::execute(BlockRun& run, const OpSequence& sequence, bool again) const {
  run.sequence_ = &sequence;
  run.is_again_ = again;
  for (std::size_t place = 0; place < sequence.ops.size(); ++place) {
    const auto i = static_cast<std::size_t>(sequence.ops[place]);
    run.place_ = static_cast<int>(place);
    if (again)
      co_await ops_[i]->again(run);
    else
      co_await ops_[i]->forward(run);
    let_go(run, program_->ops[i]);
  }
}

// Of an op's values those that nobody reads any more.
void BlockRunner::let_go(BlockRun& run, const BlockOp& op) const {
  const auto each = [&](int value) {
    if (!run.sequence_->lets_go(value, run.place_)) return;
    run.set(value, {});
    if (program_->value(value).home == Home::experts) run.routed() = {};
  };
  std::for_each(op.inputs.begin(), op.inputs.end(), each);
  std::for_each(op.outputs.begin(), op.outputs.end(), each);
}

Work<Tensor> BlockRunner::pass(BlockRun& run, const OpSequence& sequence, Tensor x) const {
  if (x.defined()) run.set(program_->input, std::move(x));
  co_await execute(run, sequence, false);
  co_return run.take_output();
}

Work<Tensor> BlockRunner::forward(const Microbatch& microbatch, Tensor x, BlockState& state) const {
  BlockRun run(*rank_, tensor_parallel_, *program_, microbatch, state, tree_, spread_.get());
  co_return co_await pass(run, passes_.forward, std::move(x));
}

Tensor BlockRunner::evaluate(const Microbatch& microbatch, Tensor x, std::int64_t position,
                             const BlockCache& cache) const {
  BlockState state;
  BlockRun run(*rank_, tensor_parallel_, *program_, microbatch, state, tree_, spread_.get());
  run.set_cache(position, cache);
  return pass(run, passes_.evaluation, std::move(x)).finish();
}

BlockCache BlockRunner::make_cache(std::int64_t max_positions) const {
  BlockCache cache;
  if (cache_width_ > 0) cache.keys = rank_->activation({max_positions, cache_width_});
  if (!tail_.empty()) cache.tail = rank_->activation(tail_);
  if (scan_) cache.state = rank_->statistic({scan_->width(), scan_->state});
  return cache;
}

Work<Tensor> BlockRunner::backward(const Microbatch& microbatch, Tensor dy, BlockState& state, Weights when,
                                   const Loss& loss) const {
  BlockRun run(*rank_, tensor_parallel_, *program_, microbatch, state, tree_, spread_.get());
  run.when_ = when;
  run.loss_ = &loss;
  run.gradients_.resize(program_->values.size());
  run.set_gradient_of_output(std::move(dy));
  for (std::size_t i = ops_.size(); i-- > 0;) {
    co_await execute(run, passes_.again[i], true);
    run.done_ = &passes_.done[i];
    co_await ops_[i]->backward(run);
    for (int value : passes_.done[i]) run.set(value, {});
  }
  if (program_->input < 0) co_return Tensor();
  co_return run.take_gradient(program_->input);
}

bool BlockRunner::adds_at_once() const {
  return std::any_of(program_->ops.begin(), program_->ops.end(), [](const BlockOp& op) {
    return (op.kind == OpKind::attention || op.kind == OpKind::norm) && !op.weights.empty() &&
           op.weights.front().shard_dim >= 0;
  });
}

void BlockRunner::backward_weight(BlockState& state) {
  for (auto& gradient : state.deferred) {
    gradient();
    gradient = nullptr;  // lets go of its tensors
  }
  state.deferred.clear();
}

}  // namespace echelon
