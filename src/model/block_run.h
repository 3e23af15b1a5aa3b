// One pass of one microbatch through a block, as its ops see it: values, gradients, and where they lie.
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

// What the gradients of a microbatch's backward pass are of, and where its loss is added to.
struct Loss {
  double gradient_scale = 0;  // gradients are those of this times the summed loss
  // (1, f64): over the targets that are not ignored. Under invariant numerics one for each sequence.
  Tensor sum;
  // The same of the tokens behind the next ones, not weighed, where a multi-token predictor is trained.
  Tensor next_sum = {};
};

struct PutAway;

// What a block keeps of one microbatch from its forward to its backward pass, or holds on the way.
struct BlockState {
  std::vector<Tensor> values;    // by number; undefined where there is none
  ExpertParallel::Saved routed;  // the value with the experts, where there is one
  // Weight gradients that the backward pass left for later.
  std::vector<std::function<void()>> deferred;
  // Where what is above lies elsewhere (offloaded_activations.h): what says so.
  std::shared_ptr<PutAway> away = {};
};

// What a block keeps of one sequence from its earlier tokens to the next: of attention the keys and values,
// (positions, width); of a state space the last rows that it convolves, and its state; of a short convolution
// these rows.
struct BlockCache {
  Tensor keys;
  Tensor tail, state;
};

// What a linear op leaves to the op behind it, which makes one pass of both (takes_product): the product of
// its output, or, of one that is made, nothing; and the bias.
struct LeftProduct {
  std::optional<MatrixProduct> product = {};
  OperandFormats formats = {};
  Tensor bias = {};
};

// When the gradients of weights are taken: as soon as their inputs exist, so that these can go, or later.
enum class Weights { now, deferred };

class BlockRun {
 public:
  // All outlive this. `spread`: nullptr where all rows are here that sums are over.
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
  // For a tp rank's part of a sum: under invariant numerics it is rounded once it has been added to the
  // others', by rounded().
  Tensor partial_sum(std::vector<std::int64_t> shape) const {
    const bool is_part = tree_ != nullptr && tensor_parallel_.size() > 1;
    return is_part ? statistic(std::move(shape)) : activation(std::move(shape));
  }
  Tensor rounded(Tensor sum) const;
  // How gradients of weights are added up.
  SequenceSums sums() const {
    const std::int64_t ranks = spread_ == nullptr ? 1 : rank_.size(Axis::cp);
    return {tree_, kernels(), microbatch_.index, microbatch_.sequences.batch, ranks * rows(), spread_};
  }
  // The same of an op that has all tokens of whole sequences, wherever those of the others are.
  SequenceSums sums_of_whole_sequences() const {
    return {tree_, kernels(), microbatch_.index, microbatch_.sequences.batch, rank_.size(Axis::cp) * rows()};
  }
  // What an op has that takes in a channel of whole sequences at a time, wherever the tokens of the others
  // are.
  SequenceRows whole_sequences() const;
  ExpertParallel::Saved& routed() const { return state_.routed; }

  // Generation: new tokens of one sequence from `position` on.
  void set_cache(std::int64_t position, BlockCache cache) { position_ = position, cache_ = std::move(cache); }
  const BlockCache& cache() const { return cache_; }  // of nothing elsewhere
  std::int64_t position() const { return position_; }

  // Forward. What is taken is the op's own where nobody reads it afterwards.
  const Tensor& value(int number) const { return state_.values[static_cast<std::size_t>(number)]; }
  void set(int number, Tensor value) { state_.values[static_cast<std::size_t>(number)] = std::move(value); }
  Tensor take(int number);
  // An op's input in the home that it wants it in.
  Tensor take_input(const BlockOp& op, std::size_t input = 0);
  // Not one that is made again for a backward pass, unless the block's only forward pass is there.
  bool is_first() const { return !is_again_ || program_.ends_in_loss(); }
  // Whether an op of this pass, which is behind the one that makes it, takes this value.
  bool is_taken(int number) const { return sequence_->last_use[static_cast<std::size_t>(number)] > place_; }
  // Whether the op behind this one takes its product, which no collective adds up before.
  bool next_takes_product(const BlockOp& product) const;
  void leave(LeftProduct left) { left_ = std::move(left); }
  LeftProduct take_left() { return std::exchange(left_, {}); }
  // What the block has made, in the residual stream.
  Tensor take_output();

  // Backward: what was kept or made again; the op's own where no other backward pass reads it.
  Tensor take_kept(int number);
  Tensor take_kept_input(const BlockOp& op, std::size_t input = 0);  // in the home that the op wants it in
  // The gradient of a value, in the value's home; in the second where the reader left it.
  Tensor take_gradient(int number);
  Tensor take_gradient_as_left(int number) { return std::exchange(gradient(number).tensor, {}); }
  void set_gradient(int number, Tensor d) { gradient(number) = {std::move(d), program_.value(number).home}; }
  // Of what a product reads the activation whose gradient is of the same pass (gives_input), if what it was
  // given is there by now, or nullptr. The product then leaves the gradient of what the activation was given,
  // and what the activation gave in the memory of that.
  const BlockOp* activation_before(const BlockOp& product) const;
  bool has_gradient(int number) { return gradient(number).tensor.defined(); }
  // Added to what other readers of the value have left.
  void add_gradient(int number, const Tensor& d);
  // The same in the home that an op wants its input in.
  void leave_gradient(const BlockOp& op, std::size_t input, Tensor d) {
    gradient(op.inputs[input]) = {std::move(d), op.wants[input]};
  }
  ExpertParallel::Backward& routed_gradient() { return routed_gradient_; }
  void set_gradient_of_output(Tensor d) {
    gradient(program_.output) = {std::move(d), program_.output_home()};
  }
  // The gradient of a value so far, to be added to; zero where there is none yet.
  Tensor gradient_to_add_to(int number);
  // Whether all that a backward pass makes is gone when the stage's is over: no weight's gradient is left for
  // later, and nothing goes to another stage.
  bool is_brief() const { return when_ == Weights::now && rank_.size(Axis::pp) == 1; }
  // Takes a weight's gradient now or later; the second once the value is there that it reads.
  Weights when() const { return when_; }
  void weight_gradient(std::function<void()> take);
  void weight_gradient(int number, std::function<void(const Tensor&)> take);
  // Where the block ends in it.
  const Loss& loss() const { return *loss_; }
  // A value that a backward pass has made, and whether a weight's gradient waits for it.
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
  // Where in the pass it stands.
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
