// The layers of one pipeline stage, and how they run an instruction. Without pipeline parallelism a single
// stage is the whole model.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "model/block_runner.h"
#include "model/offloaded_activations.h"
#include "parallel/faults.h"
#include "spec/plan.h"

namespace echelon {

class Stage {
 public:
  // `first_group`: the layer group of the stage's first block in `parameters`, which outlives this.
  // `offloaded`: null if activations are not offloaded.
  Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const StageSlice& slice,
        int first_group, const Faults& faults,
        std::shared_ptr<const OffloadedActivations> offloaded = nullptr);

  // What forward() keeps of one microbatch for its backward pass, and B for W.
  using Saved = std::vector<BlockState>;
  // Called when a microbatch's contribution to a layer group's gradients is complete.
  using GroupDone = std::function<void(int group)>;

  // Passes the residual stream on; `input` is undefined if the stage has the embedding, the result if it has
  // the head. Passes pause as BlockRunner's do. `turns`: the backward pass comes next, so what it needs first
  // is not offloaded.
  Work<Tensor> forward(const Microbatch& microbatch, Tensor input, Saved& saved, bool turns = false) const;
  // Announces that the backward pass of this microbatch is next: starts to bring back what it needs first.
  void expect_backward(Saved& saved) const;

  // The backward pass. If the stage has the head, it begins with cross-entropy and its gradient (`dy` is
  // undefined). Adds to parameter gradients; if these are deferred, backward_weight() adds those of weights,
  // except the head's, whose logits exist only here. The result is undefined if the stage has the embedding.
  // `all_asked_for`, if any, is called once the last block's offloaded activations have been requested:
  // whatever comes next may then request its own.
  Work<Tensor> backward(const Microbatch& microbatch, Tensor dy, Loss loss, Saved& saved, Weights when,
                        GroupDone group_done, std::function<void()> all_asked_for = {}) const;
  void backward_weight(Saved& saved, const GroupDone& group_done) const;

  // Without gradients: from residual stream to residual stream, or to BlockRunner::evaluate()'s result. With
  // caches: one sequence of new tokens at [position, ...).
  Tensor evaluate(const Microbatch& microbatch, Tensor input, std::int64_t position,
                  const std::vector<BlockCache>& caches) const;
  std::vector<BlockCache> make_caches(std::int64_t max_positions) const;

  // The stage's layers with experts.
  struct Mixture {
    std::int64_t layer;
    const ExpertParallel* experts;
  };
  std::vector<Mixture> mixtures() const;

 private:
  // Each block is a layer group. The head reads the group that has the output layer's matrix.
  int group_of(std::size_t block) const { return first_group_ + static_cast<int>(block); }
  int group_read_by(std::size_t block) const;
  void need_gradients(std::size_t block) const;
  void bring(Saved& saved, std::size_t block) const;
  // The first block that keeps something of a microbatch.
  std::size_t first_kept() const {
    return std::max<std::size_t>(idle_, !blocks_.empty() && blocks_.front().begins_with_tokens());
  }

  const Rank* rank_;
  const ParameterStore* parameters_;
  int first_group_;
  // Of the first block; if that is the embedding, one less.
  std::int64_t first_layer_;
  std::size_t idle_;                 // the first blocks, which have no backward pass
  std::vector<BlockRunner> blocks_;  // embedding, layers, head
  std::shared_ptr<const OffloadedActivations> offloaded_;
};

}  // namespace echelon
