// The layers of one pipeline stage, and what an instruction does with them. Without pipeline parallelism one
// stage is the model.
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
  // `first_group`: layer group of the stage's first part in `parameters`, which outlive this. `offloaded`:
  // null where activations stay.
  Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const StageSlice& slice,
        int first_group, const Faults& faults,
        std::shared_ptr<const OffloadedActivations> offloaded = nullptr);

  // What forward keeps of one microbatch until its backward, and B until W.
  using Saved = std::vector<BlockState>;
  // Called when the gradients of a layer group have got a microbatch's part.
  using GroupDone = std::function<void(int group)>;

  // The residual stream from stage to stage; `input` is undefined where the stage has the embedding, the
  // result where it has the head.
  // Passes pause as BlockRunner's do. `turns`: the backward pass comes next, so that what it begins with
  // stays.
  Work<Tensor> forward(const Microbatch& microbatch, Tensor input, Saved& saved, bool turns = false) const;
  // The backward pass of this comes next: asks for what it begins with.
  void expect_backward(Saved& saved) const;

  // Cross-entropy and its gradient first where the stage has the head (`dy` is undefined there). Adds to the
  // parameter gradients. Deferred: but for the head's, whose logits exist only here, weights get theirs in
  // backward_weight(). The result is undefined where the stage has the embedding.
  // `all_asked_for`, if any, is called where the last block's activations that are offloaded have been asked
  // for: whatever comes next may ask for its own.
  Work<Tensor> backward(const Microbatch& microbatch, Tensor dy, Loss loss, Saved& saved, Weights when,
                        GroupDone group_done, std::function<void()> all_asked_for = {}) const;
  void backward_weight(Saved& saved, const GroupDone& group_done) const;

  // Without gradients: residual stream to residual stream, or what BlockRunner::evaluate() makes of it. With
  // caches, one sequence of new tokens at [position, ...).
  Tensor evaluate(const Microbatch& microbatch, Tensor input, std::int64_t position,
                  const std::vector<BlockCache>& caches) const;
  std::vector<BlockCache> make_caches(std::int64_t max_positions) const;

  // Its layers that have experts.
  struct Mixture {
    std::int64_t layer;
    const ExpertParallel* experts;
  };
  std::vector<Mixture> mixtures() const;

 private:
  // Of the blocks, one group each. What the head reads is where the output layer's matrix is.
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
  std::int64_t first_layer_;         // of the first block, or one before it where that is the embedding
  std::size_t idle_;                 // the first blocks: nothing is trained so far
  std::vector<BlockRunner> blocks_;  // embedding, layers, head
  std::shared_ptr<const OffloadedActivations> offloaded_;
};

}  // namespace echelon
