// Vocabulary parallelism (Yeung et al. 2024, https://arxiv.org/abs/2411.05288, algorithm 2): the output layer
// is cut by vocabulary over the pipeline ranks, and each rank's part over its tp group. The schedule decides
// when each pass runs (schedule/vocabulary.h). The softmax is exact: each part computes its own, and sends
// back how it is to be scaled.
//
// Bytes sent per microbatch of N tokens: the last stage sends its output, N x C elements, to every other
// rank. It gets back two gradients of that size and 3 N numbers, and then sends N numbers. One gradient is
// the mean of the part's rows weighted by their probabilities, the other the targets' rows: only the first is
// scaled once all parts are known.
//
// Under invariant numerics a part consists of blocks of the vocabulary (parallel/softmax_blocks.h). For each
// of its b blocks a rank sends N x C products of exponentials separately, in the wide dtype, and 3 N numbers
// and N scales: b + 1 gradients of all N rows, the last of the targets' rows.
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
  VocabularyParallel(const Rank& rank, const Plan& plan, OutputWeights weights);

  // What V keeps for VW.
  struct Saved {
    Tensor input;         // (rows here, C)
    Tensor exponentials;  // (N, V_local) wide: exp(logits - the part's maximum)
  };
  // What V sends to the last stage.
  struct Part {
    Tensor gradient;  // (2 x rows here, C)
    Tensor sums;      // (3 N), wide: maxima, sums of exponentials, targets' logits; for each block
  };
  // hidden (rows here, C): the last stage's output; targets (N, i32).
  Part forward(const Tensor& hidden, const Tensor& targets, Saved& saved) const;
  // scale (N), wide: this part's entry of Whole::scales. Adds to the gradients of this part's rows of the
  // table and of its bias, by `sums`.
  void backward_weight(const Saved& saved, const Tensor& scale, const Tensor& targets, double gradient_scale,
                       const SequenceSums& sums) const;

  // What the last stage merges from all parts: the gradient (rows here, C) of its output, and the divisors of
  // each part's exponentials. Adds to loss_sum (1, f64), or to one entry for each run of rows.
  struct Whole {
    Tensor gradient;
    std::vector<Tensor> scales;
  };
  Whole merge(const std::vector<Part>& parts, const Tensor& targets, double gradient_scale,
              const Tensor& loss_sum, const std::vector<Range>& runs) const;
  // Allocate the travelling values of N tokens.
  Tensor make_gradient(std::int64_t rows) const;
  Tensor make_sums(std::int64_t rows) const {
    return rank_->statistic({3 * (blocks_ ? blocks_->count() * tensor_parallel_.size() : 1) * rows});
  }
  Tensor make_scale(std::int64_t rows) const {
    return rank_->statistic({(blocks_ ? blocks_->count() : 1) * rows});
  }

  // Without gradients. `hidden` is the value on pipeline rank `from`, and memory for it elsewhere. Collective
  // over pp and tp: returns the summed loss (1, f64), or the last row's logits (1, V), on every rank.
  Tensor loss(const Tensor& hidden, const Tensor& targets, int from, const std::vector<Range>& runs) const;
  Tensor logits(const Tensor& hidden, int from) const;

 private:
  int num_parts() const { return static_cast<int>(bounds_.size()) - 1; }
  // Replaces a chunk's logits by exponentials, and stores their sums over the part.
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
  std::optional<SoftmaxBlocks> blocks_;  // of this part, under invariant numerics
  std::vector<std::int64_t> bounds_;     // first row of each part, and the end
};

}  // namespace echelon
