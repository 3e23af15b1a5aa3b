// Runs a block (spec/block.h) on one rank: a transformer layer, the embedding or the output layer. There is
// no tape: what a forward pass keeps is passed in as a value, so any number of microbatches can be in flight.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "model/op.h"

namespace echelon {

class BlockRunner {
 public:
  // All arguments that are references outlive this.
  BlockRunner(BlockProgram program, const Rank& rank, const Plan& plan, const ParameterStore& parameters,
              TensorParallel tensor_parallel, const Faults& faults);

  // Passes pause during the exchange of experts; their arguments outlive them. x is undefined if the block
  // begins with tokens.
  Work<Tensor> forward(const Microbatch& microbatch, Tensor x, BlockState& state) const;
  // dy is the gradient of forward()'s result, undefined if that is the loss. Returns the gradient of x, which
  // may use dy's memory.
  Work<Tensor> backward(const Microbatch& microbatch, Tensor dy, BlockState& state, Weights when,
                        const Loss& loss) const;
  bool begins_with_tokens() const { return program_->input < 0; }
  bool reads_values_backward() const { return program_->reads_values_backward(); }
  bool ends_in_loss() const { return program_->ends_in_loss(); }
  // Whether the backward pass itself adds to gradients of weights that tp cuts, even if weight gradients are
  // deferred: those of sinks, and of norms over all queries and keys.
  bool adds_at_once() const;
  // Computes the deferred weight gradients.
  static void backward_weight(BlockState& state);

  // Without gradients. The result of the output layer is the summed loss (1, f64), or without targets the
  // logits (1, V_local) of the last row. With a cache, the microbatch is one sequence of new tokens from
  // `position` on, and the cache receives what later tokens need.
  Tensor evaluate(const Microbatch& microbatch, Tensor x, std::int64_t position = 0,
                  const BlockCache& cache = {}) const;
  // For up to `max_positions` positions.
  BlockCache make_cache(std::int64_t max_positions) const;

  // nullptr if the block has no experts.
  const ExpertParallel* experts() const { return experts_.get(); }

 private:
  Work<void> execute(BlockRun& run, const OpSequence& sequence, bool again) const;
  Work<Tensor> pass(BlockRun& run, const OpSequence& sequence, Tensor x) const;
  void let_go(BlockRun& run, const BlockOp& op) const;

  std::unique_ptr<const BlockProgram> program_;
  BlockPasses passes_;
  const Rank* rank_;
  TensorParallel tensor_parallel_;
  const SequenceTree* tree_;
  std::shared_ptr<const SpreadRows> spread_;  // nullptr: all rows are here
  std::shared_ptr<const ExpertParallel> experts_;
  std::int64_t cache_width_ = 0;         // of keys and values
  std::optional<StateSpaceShape> scan_;  // of the state space
  std::vector<std::int64_t> tail_;       // shape of the convolution's cached rows
  std::vector<std::unique_ptr<OpRunner>> ops_;
};

}  // namespace echelon
