// The layers of one pipeline stage, and what an instruction does with them. Without pipeline parallelism one
// stage is the model.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "model/block_runner.h"
#include "parallel/faults.h"
#include "parallel/vocabulary_parallel.h"
#include "spec/plan.h"
#include "spec/routing_balance.h"

namespace echelon {

class Stage {
 public:
  // `first_group`: layer group of the stage's first part in `parameters`, which outlive this.
  Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const StageSlice& slice,
        int first_group, const Faults& faults);

  bool has_embedding() const { return has_embedding_; }
  bool has_head() const { return head_.has_value(); }

  // What forward keeps of one microbatch until its backward, and B until W.
  struct Saved {
    std::vector<BlockState> blocks;
    Tensor out;  // of the last block: the head's input
  };
  // Called when the gradients of a layer group have got a microbatch's part.
  using GroupDone = std::function<void(int group)>;

  // The residual stream from stage to stage; `input` is undefined where the stage has the embedding, the
  // result where it has the head.
  // Passes pause as BlockRunner's do.
  Work<Tensor> forward(const Microbatch& microbatch, Tensor input, Saved& saved) const;

  struct Backward {
    Tensor dx;        // undefined where the stage has the embedding
    Tensor loss_sum;  // (1, f64): over the targets that are not ignored, where it has the head
  };
  // Cross-entropy and its gradient first where the stage has the head (`dy` is undefined there). Adds to the
  // parameter gradients, which are those of gradient_scale * loss_sum.
  // Deferred: but for the head's, whose logits exist only here, weights get theirs in backward_weight().
  Work<Backward> backward(const Microbatch& microbatch, Tensor dy, double gradient_scale, Saved& saved,
                          Weights when, GroupDone group_done) const;
  void backward_weight(Saved& saved, const GroupDone& group_done) const;

  // Without gradients.
  Tensor evaluate(const Microbatch& microbatch, Tensor input) const;
  double loss(const Microbatch& microbatch, const Tensor& input) const;  // loss_sum of the head

  // Generation, one sequence of new tokens at [position, ...): residual stream to residual stream, then
  // logits (1, V_local).
  Tensor generate(const Microbatch& tokens, Tensor input, std::int64_t position,
                  const std::vector<Tensor>& caches) const;
  Tensor logits(const Tensor& input) const;
  std::vector<Tensor> make_caches(std::int64_t max_positions) const;

  // The counts of each layer that has experts, since they were last taken; see ExpertParallel.
  void take_routing_counts(std::vector<RoutingCounts>& counts) const;
  MovedCopies take_moved_copies() const;  // of all of them together
  void begin_step() const;                // of training
  // From those of a whole step: moves the routers' biases.
  void balance_routers(const std::vector<RoutingCounts>& counts) const;
  void take_router_biases(RouterBiases& biases) const;  // adds those of this stage's layers
  void watch_routing(RoutingWatch* watch) const;        // of all layers; it outlives this
  void set_router_biases(const RouterBiases& biases) const;

 private:
  Tensor head_backward(const Microbatch& microbatch, double gradient_scale, Saved& saved,
                       const GroupDone& group_done, Tensor& loss_sum) const;
  // Of the blocks, one group each.
  int group_of(std::size_t block) const { return first_group_ + static_cast<int>(block); }
  template <class Visit>
  void each_mixture(const Visit& visit) const;

  const Rank* rank_;
  const ParameterStore* parameters_;
  int first_group_;
  bool has_embedding_;        // which is then the first block
  std::int64_t first_layer_;  // of the blocks behind it
  std::vector<BlockRunner> blocks_;
  std::optional<OutputHead> head_;
};

}  // namespace echelon
