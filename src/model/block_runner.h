// Runs a block (spec/block.h) on one rank: a transformer layer, the embedding, the output layer. No tape:
// what a forward pass keeps is a value handed in, so any number of microbatches can be in flight.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "model/op.h"

namespace echelon {

class BlockRunner {
 public:
  // What the setting names outlives this.
  BlockRunner(BlockProgram program, const Rank& rank, const Plan& plan, const ParameterStore& parameters,
              TensorParallel tensor_parallel, const Faults& faults);

  // Passes pause where experts are exchanged; what they are given outlives them. x is undefined where the
  // block begins with tokens.
  Work<Tensor> forward(const Microbatch& microbatch, Tensor x, BlockState& state) const;
  // dy is the gradient of forward's result, undefined where that is the loss; returns the gradient of x,
  // which may be dy's memory.
  Work<Tensor> backward(const Microbatch& microbatch, Tensor dy, BlockState& state, Weights when,
                        const Loss& loss) const;
  bool begins_with_tokens() const { return program_->input < 0; }
  bool reads_values_backward() const { return program_->reads_values_backward(); }
  bool ends_in_loss() const { return program_->ends_in_loss(); }
  // Whether a backward pass adds to gradients of weights that tp cuts, whatever is left for later: of sinks,
  // and of norms of all queries and keys.
  bool adds_at_once() const;
  // The weights' gradients that were deferred.
  static void backward_weight(BlockState& state);

  // Without gradients. The result of the output layer is the summed loss (1, f64), or where there are no
  // targets the logits (1, V_local) of the last row.
  // With a cache it is one sequence of new tokens from `position` on, of which what later ones need goes
  // there.
  Tensor evaluate(const Microbatch& microbatch, Tensor x, std::int64_t position = 0,
                  const BlockCache& cache = {}) const;
  // For so many positions.
  BlockCache make_cache(std::int64_t max_positions) const;

  // nullptr where there are none.
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
  std::optional<StateSpaceShape> scan_;  // of a state space
  std::vector<std::int64_t> tail_;       // rows of a convolution that new tokens see, and their columns
  std::vector<std::unique_ptr<OpRunner>> ops_;
};

}  // namespace echelon
