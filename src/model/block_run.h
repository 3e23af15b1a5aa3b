// One pass of one microbatch through a block, as its ops see it: values, gradients, and their placements.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "model/microbatch.h"
#include "parallel/expert_parallel.h"
#include "parallel/tensor_parallel.h"
#include "spec/block_passes.h"
#include "tensor/sequence_sums.h"

namespace echelon {

// The scale of a microbatch's gradients, and where its loss is accumulated.
struct Loss {
  double gradient_scale = 0;  // gradients are those of this times the summed loss
  // The loss (1, f64), summed over targets that are not ignored. Under invariant numerics, one for each
  // sequence.
  Tensor sum;
  // The same for multi-token prediction, if the model has it; without its weight.
  Tensor next_sum = {};
};

struct PutAway;

// What a block keeps of one microbatch from its forward to its backward pass, or holds during a pass.
struct BlockState {
  std::vector<Tensor> values;    // by index; undefined if absent
  ExpertParallel::Saved routed;  // the value on the experts, if there is one
  // Weight gradients that the backward pass left for later (W).
  std::vector<std::function<void()>> deferred;
  // If the above is offloaded (offloaded_activations.h): where it is.
  std::shared_ptr<PutAway> away = {};
};

// What a block keeps of a sequence during generation. Attention: keys and values (positions, width). A state
// space: the last rows of its convolution, and its state. A short convolution: its last rows.
struct BlockCache {
  Tensor keys;
  Tensor tail, state;
};

// What a linear op leaves to the next op, which makes one pass of both (takes_product): the product that
// computes its output, or none if that is already computed; and the bias.
struct LeftProduct {
  std::optional<MatrixProduct> product = {};
  OperandFormats formats = {};
  Tensor bias = {};
};

// When gradients of weights are computed: as soon as their inputs exist, so that these can be freed, or
// later.
enum class Weights { now, deferred };

class BlockRun {
 public:
  // All outlive this. `spread`: nullptr if this rank has all rows over which gradients of weights are summed.
  BlockRun(const Rank& rank, const TensorParallel& tensor_parallel, const BlockProgram& program,
           const Microbatch& microbatch, BlockState& state, const SequenceTree* tree,
           const SpreadRows* spread = nullptr)
      : rank_(rank),
        tensor_parallel_(tensor_parallel),
        program_(program),
        microbatch_(microbatch),
        state_(state),
        tree_(tree),
        spread_(spread) {
    state_.values.resize(program.values.size());
  }

  const Rank& rank() const { return rank_; }
  Kernels& kernels() const { return rank_.kernels(); }
  const TensorParallel& tensor_parallel() const { return tensor_parallel_; }
  const Microbatch& microbatch() const { return microbatch_; }
  std::int64_t rows() const { return microbatch_.rows(); }  // N, all of them on every tp rank
  Tensor activation(std::vector<std::int64_t> shape) const { return rank_.activation(std::move(shape)); }
  Tensor statistic(std::vector<std::int64_t> shape) const { return rank_.statistic(std::move(shape)); }
  // Allocates a tp rank's part of a sum. Under invariant numerics it is wide, and rounded() rounds it after
  // it was summed over the ranks.
  Tensor partial_sum(std::vector<std::int64_t> shape) const {
    const bool is_part = tree_ != nullptr && tensor_parallel_.size() > 1;
    return is_part ? statistic(std::move(shape)) : activation(std::move(shape));
  }
  Tensor rounded(Tensor sum) const;
  // How gradients of weights are summed.
  SequenceSums sums() const {
    const std::int64_t ranks = spread_ == nullptr ? 1 : rank_.size(Axis::cp);
    return {tree_, kernels(), microbatch_.index, microbatch_.sequences.batch, ranks * rows(), spread_};
  }
  // The same for an op that has all tokens of whole sequences, wherever other ops have theirs.
  SequenceSums sums_of_whole_sequences() const {
    return {tree_, kernels(), microbatch_.index, microbatch_.sequences.batch, rank_.size(Axis::cp) * rows()};
  }
  // The rows of an op that processes channels of whole sequences, wherever other ops have their tokens.
  SequenceRows whole_sequences() const;
  ExpertParallel::Saved& routed() const { return state_.routed; }

  // Generation: new tokens of one sequence from `position` on.
  void set_cache(std::int64_t position, BlockCache cache) { position_ = position, cache_ = std::move(cache); }
  const BlockCache& cache() const { return cache_; }  // empty outside generation
  std::int64_t position() const { return position_; }

  // Forward. A value that is taken belongs to the op, if nobody reads it afterwards.
  const Tensor& value(int number) const { return state_.values[static_cast<std::size_t>(number)]; }
  void set(int number, Tensor value) { state_.values[static_cast<std::size_t>(number)] = std::move(value); }
  Tensor take(int number);
  // An op's input, in the placement in which the op wants it.
  Tensor take_input(const BlockOp& op, std::size_t input = 0);
  // Whether this is the op's first run, not a recomputation for the backward pass (unless the block has no
  // other forward pass).
  bool is_first() const { return !is_again_ || program_.ends_in_loss(); }
  // Whether a later op of this pass takes this value.
  bool is_taken(int number) const { return sequence_->last_use[static_cast<std::size_t>(number)] > place_; }
  // Whether the next op takes this op's product, with no collective in between.
  bool next_takes_product(const BlockOp& product) const;
  void leave(LeftProduct left) { left_ = std::move(left); }
  LeftProduct take_left() { return std::exchange(left_, {}); }
  // The block's output, in the residual stream's placement.
  Tensor take_output();

  // Backward. Takes a value that was kept or recomputed; it belongs to the op if no other backward pass reads
  // it.
  Tensor take_kept(int number);
  Tensor take_kept_input(const BlockOp& op,
                         std::size_t input = 0);  // in the placement in which the op wants it
  // Takes the gradient of a value: in the value's placement, or in the placement in which its reader left it.
  Tensor take_gradient(int number);
  Tensor take_gradient_as_left(int number) { return std::exchange(gradient(number).tensor, {}); }
  void set_gradient(int number, Tensor d) { gradient(number) = {std::move(d), program_.value(number).home}; }
  // The activation that computed a product's input, if its gradient can run in the same pass (gives_input)
  // and its own input is already there; else nullptr. The product then leaves the gradient of the
  // activation's input, and puts the activation's output into the memory of that input.
  const BlockOp* activation_before(const BlockOp& product) const;
  bool has_gradient(int number) { return gradient(number).tensor.defined(); }
  // Adds to what other readers of the value have left.
  void add_gradient(int number, const Tensor& d);
  // Leaves the gradient in the placement in which the op wants its input.
  void leave_gradient(const BlockOp& op, std::size_t input, Tensor d) {
    gradient(op.inputs[input]) = {std::move(d), op.wants[input]};
  }
  ExpertParallel::Backward& routed_gradient() { return routed_gradient_; }
  void set_gradient_of_output(Tensor d) {
    gradient(program_.output) = {std::move(d), program_.output_home()};
  }
  // The gradient of a value so far, to accumulate into; zero if there is none yet.
  Tensor gradient_to_add_to(int number);
  // Whether everything that a backward pass allocates is freed when the stage's pass ends: no weight gradient
  // is deferred, and nothing goes to another stage.
  bool is_brief() const { return when_ == Weights::now && rank_.size(Axis::pp) == 1; }
  // Computes a weight's gradient now or later; the second overload, once the value that it reads is there.
  Weights when() const { return when_; }
  void weight_gradient(std::function<void()> take);
  void weight_gradient(int number, std::function<void(const Tensor&)> take);
  // If the block ends in a loss.
  const Loss& loss() const { return *loss_; }
  // Whether a weight's gradient waits for a value; provide() passes that value on.
  bool is_awaited(int number) const { return waiting_.contains(number); }
  void provide(int number, Tensor value);

 private:
  friend class BlockRunner;
  struct Gradient {
    Tensor tensor;
    Home home = Home::residual;
  };
  Tensor bring(Tensor x, Home from, Home to) const;
  Gradient& gradient(int number) { return gradients_[static_cast<std::size_t>(number)]; }

  const Rank& rank_;
  const TensorParallel& tensor_parallel_;
  const BlockProgram& program_;
  const Microbatch& microbatch_;
  BlockState& state_;
  const SequenceTree* tree_;  // nullptr: ordinary numerics
  const SpreadRows* spread_;
  std::int64_t position_ = 0;
  BlockCache cache_;
  LeftProduct left_;
  // Position within the pass.
  const OpSequence* sequence_ = nullptr;
  int place_ = 0;
  bool is_again_ = false;
  const std::vector<int>* done_ = nullptr;
  Weights when_ = Weights::now;
  const Loss* loss_ = nullptr;
  std::vector<Gradient> gradients_;  // by value
  ExpertParallel::Backward routed_gradient_;
  std::map<int, std::vector<std::function<void(const Tensor&)>>> waiting_;
};

}  // namespace echelon
