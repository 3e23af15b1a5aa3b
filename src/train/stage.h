// The layers of one pipeline rank, and the two things an instruction does with them: forward and backward of
// a microbatch.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "parallel/faults.h"
#include "parallel/vocabulary_parallel.h"
#include "spec/plan.h"
#include "train/transformer_block.h"

namespace echelon {

class Stage {
 public:
  Stage(const Rank& rank, const Plan& plan, const ParameterStore& parameters, const Faults& faults);

  // What forward keeps of one microbatch until its backward.
  struct Saved {
    std::vector<TransformerBlock::Saved> blocks;
    Tensor out;  // of the last block: the head's input
  };

  void forward(const Microbatch& microbatch, Saved& saved) const;
  // Cross-entropy and its gradient, then every layer backwards. Adds to the parameter gradients, which are
  // those of gradient_scale * loss_sum. `group_done(g)` is called as soon as the gradients of layer group g
  // are complete. Returns loss_sum over the targets that are not ignored.
  double backward(const Microbatch& microbatch, double gradient_scale, Saved& saved,
                  const std::function<void(int group)>& group_done) const;
  // loss_sum without gradients.
  double evaluate(const Microbatch& microbatch) const;

  // Generation, one sequence: logits (1, V) after the last of the new tokens, which stand at [position, ...).
  Tensor next_logits(const Tensor& tokens, std::int64_t position, const std::vector<Tensor>& caches) const;
  std::vector<Tensor> make_caches(std::int64_t max_positions) const;

 private:
  Tensor embed(const Tensor& tokens, std::int64_t seq_len, std::int64_t first_position) const;
  Tensor positions_here(std::int64_t rows, std::int64_t seq_len, std::int64_t first_position) const;
  void embed_backward(const Microbatch& microbatch, const Tensor& dx) const;

  const Rank* rank_;
  TensorParallel tensor_parallel_;
  std::optional<VocabularyEmbedding> embedding_;
  Weight positions_;  // learned (GPT-2); undefined otherwise
  std::vector<TransformerBlock> blocks_;
  std::optional<OutputHead> head_;
};

}  // namespace echelon
