// Runs one op of a block (spec/block.h) on a rank; a file for each kind, op_*.cpp. An op only computes on
// tensors; the block decides what is kept, freed and recomputed (block_runner.h).
#pragma once

#include <memory>

#include "model/block_run.h"
#include "model/parameters.h"
#include "parallel/faults.h"

namespace echelon {

class OpRunner {
 public:
  // `op` outlives this.
  explicit OpRunner(const BlockOp& op) : op_(op) {}
  virtual ~OpRunner() = default;
  OpRunner(const OpRunner&) = delete;
  OpRunner& operator=(const OpRunner&) = delete;

  // forward() sets the op's outputs from its inputs; again() recomputes those that the backward pass reads.
  // backward() takes the gradients of outputs, sets those of inputs, and adds those of weights or defers
  // them. All three may pause.
  virtual Work<void> forward(BlockRun& run) const {
    run_forward(run);
    co_return;
  }
  virtual Work<void> again(BlockRun& run) const {
    const Arena::BriefUse brief(run.rank().arena(), run.is_brief());
    run_again(run);
    co_return;
  }
  virtual Work<void> backward(BlockRun& run) const {
    const Arena::BriefUse brief(run.rank().arena(), run.is_brief());
    run_backward(run);
    co_return;
  }

 protected:
  // The same, for ops that never pause.
  virtual void run_forward(BlockRun&) const {}
  virtual void run_again(BlockRun& run) const { run_forward(run); }
  virtual void run_backward(BlockRun&) const {}

  const BlockOp& op() const { return op_; }
  int in(std::size_t i = 0) const { return op_.inputs[i]; }
  int out(std::size_t i = 0) const { return op_.outputs[i]; }

 private:
  const BlockOp& op_;
};

// What all ops of a rank's block need; outlives them.
struct OpSetting {
  const Rank& rank;
  const Plan& plan;
  const ParameterStore& parameters;
  TensorParallel tensor_parallel;
  std::shared_ptr<const ExpertParallel> experts;  // of this block
  const Faults& faults;

  // An op's weights or biases as one; undefined if it has none.
  Weight stacked(const std::vector<ParamSpec>& list) const;
  // The same in runs of trained and of frozen ones, which are not contiguous.
  std::vector<Weight> runs(const std::vector<ParamSpec>& list) const;
};

// The heads of this tp rank. With fewer key/value heads than ranks, neighbouring ranks hold the same one.
Heads heads_here(const ModelSpec& model, const TensorParallel& tp);
// The same for a state space, without rows; groups are repeated likewise.
StateSpaceShape state_space_here(const Plan& plan);
// The first vocabulary row of a table that this rank holds.
std::int64_t first_id_here(const ParamSpec& table, const OpSetting& s);
// For a block with experts: what both of its ops use.
std::shared_ptr<const ExpertParallel> make_experts(const BlockOp& op, const OpSetting& s);

using MakeOp = std::unique_ptr<OpRunner>(const BlockOp& op, const OpSetting& s);
MakeOp make_embedding_op, make_positions_op, make_norm_op, make_linear_op, make_rope_op, make_attention_op,
    make_activation_op, make_residual_op, make_sum_op, make_experts_in_op, make_experts_out_op, make_loss_op,
    make_latent_op, make_narrow_op, make_state_space_op, make_short_conv_op, make_scale_op, make_gate_op,
    make_join_op;
MakeOp make_op;  // dispatches by kind

}  // namespace echelon
