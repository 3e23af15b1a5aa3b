// Vocabulary parallelism (Yeung et al. 2024, https://arxiv.org/abs/2411.05288, algorithm 2): the output layer
// cut by vocabulary over the pipeline's ranks, and each rank's part over its tp group. Which pass runs when
// is the schedule's affair (schedule/vocabulary.h). Softmax is exact: each part makes its own, and what it
// hands back says by how much that is to be scaled.
//
// Bytes sent per microbatch of N tokens: the last stage sends every other rank its output, N x C elements,
// and gets two gradients of that size and 3 N numbers back, then sends N numbers. Of the two one is the mean
// of the part's rows by their probabilities, the other the targets' rows: the first is scaled once all parts
// are known, the second is not.
//
// Under invariant numerics a part is some blocks of the vocabulary (parallel/softmax_blocks.h). What a rank
// has of one of these, N x C products of exponentials, travels for itself and wide, as do 3 N numbers and N
// scales of each: with b blocks here b + 1 gradients of all N rows, the last one of the targets' rows.
#pragma once

#include <optional>
#include <vector>

#include "parallel/softmax_blocks.h"
#include "parallel/tensor_parallel.h"
#include "parallel/vocabulary_logits.h"
#include "spec/plan.h"
#include "tensor/sequence_sums.h"

namespace echelon {

class VocabularyParallel {
 public:
  VocabularyParallel(const Rank& rank, const Plan& plan, Weight table);

  // What V keeps for VW.
  struct Saved {
    Tensor input;         // (rows here, C)
    Tensor exponentials;  // (N, V_local) wide: exp(logits - the part's maximum)
  };
  // What it hands to the last stage.
  struct Part {
    Tensor gradient;  // (2 x rows here, C)
    Tensor sums;      // (3 N) wide: maxima, sums of exponentials, targets' logits; of each block
  };
  // hidden (rows here, C): the last stage's output; targets (N, i32).
  Part forward(const Tensor& hidden, const Tensor& targets, Saved& saved) const;
  // scale (N) wide: this part's of Whole::scales. Adds to the gradient of its rows of the table, by `sums`.
  void backward_weight(const Saved& saved, const Tensor& scale, const Tensor& targets, double gradient_scale,
                       const SequenceSums& sums) const;

  // What the last stage makes of all parts: the gradient (rows here, C) of its output, and what each part's
  // exponentials are to be divided by. Adds to loss_sum (1, f64), or one of each run of rows.
  struct Whole {
    Tensor gradient;
    std::vector<Tensor> scales;
  };
  Whole merge(const std::vector<Part>& parts, const Tensor& targets, double gradient_scale,
              const Tensor& loss_sum, const std::vector<Range>& runs) const;
  // Room for what travels, of N tokens.
  Tensor make_gradient(std::int64_t rows) const;
  Tensor make_sums(std::int64_t rows) const {
    return rank_->statistic({3 * (blocks_ ? blocks_->count() * tensor_parallel_.size() : 1) * rows});
  }
  Tensor make_scale(std::int64_t rows) const {
    return rank_->statistic({(blocks_ ? blocks_->count() : 1) * rows});
  }

  // Without gradients; `hidden` is on pipeline rank `from`, elsewhere room for it. Collective over pp and tp:
  // the summed loss (1, f64), or the last row's logits (1, V), on every rank.
  Tensor loss(const Tensor& hidden, const Tensor& targets, int from, const std::vector<Range>& runs) const;
  Tensor logits(const Tensor& hidden, int from) const;

 private:
  int num_parts() const { return static_cast<int>(bounds_.size()) - 1; }
  // Makes a chunk's logits exponentials, and keeps their sums over the part.
  void add_up(const Tensor& logits, const Tensor& targets, const Tensor& sums, Range chunk) const;
  Tensor merged(const Tensor& sums, const Tensor& targets, const Tensor& scales, const Tensor& shares) const;

  // The same in blocks.
  Part forward_blocks(const Tensor& x, const Tensor& targets, const Tensor& exponentials) const;
  Tensor sums_of_part(const Tensor& exponentials, const Tensor& targets) const;
  void add_losses(const SoftmaxBlocks::Whole& whole, const Tensor& targets, Range run,
                  const Tensor& loss_sum) const;
  Whole merge_blocks(const std::vector<Part>& parts, const Tensor& targets, double gradient_scale,
                     const Tensor& loss_sum, const std::vector<Range>& runs) const;
  Tensor rows_of_targets(const Tensor& of_part, const Tensor& targets, Range ids) const;

  const Rank* rank_;
  TensorParallel tensor_parallel_;
  VocabularyLogits logits_;              // of the part
  std::optional<SoftmaxBlocks> blocks_;  // of what is here, under invariant numerics
  std::vector<std::int64_t> bounds_;     // first row of each part, and the end
};

}  // namespace echelon
