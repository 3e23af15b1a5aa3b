// Vocabulary parallelism (Yeung et al. 2024, https://arxiv.org/abs/2411.05288, algorithm 2): the output layer
// cut by vocabulary over the pipeline's ranks, and each rank's part over its tp group. Which pass runs when
// is the schedule's affair (schedule/vocabulary.h). Softmax is exact: each part makes its own, and what it
// hands back says by how much that is to be scaled.
//
// Bytes sent per microbatch of N tokens: the last stage sends every other rank its output, N x C elements,
// and gets two gradients of that size and 3 N numbers back, then sends N numbers. Of the two one is the mean
// of the part's rows by their probabilities, the other the targets' rows: the first is scaled once all parts
// are known, the second is not.
#pragma once

#include <vector>

#include "parallel/tensor_parallel.h"
#include "parallel/vocabulary_logits.h"
#include "spec/plan.h"

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
    Tensor sums;      // (3 N) wide: maxima, sums of exponentials, targets' logits
  };
  // hidden (rows here, C): the last stage's output; targets (N, i32).
  Part forward(const Tensor& hidden, const Tensor& targets, Saved& saved) const;
  // scale (N) wide: this part's of Whole::scales. Adds to the gradient of its rows of the table.
  void backward_weight(const Saved& saved, const Tensor& scale, const Tensor& targets,
                       double gradient_scale) const;

  // What the last stage makes of all parts: the gradient (rows here, C) of its output, and what each part's
  // exponentials are to be divided by. Adds to loss_sum (1, f64).
  struct Whole {
    Tensor gradient;
    std::vector<Tensor> scales;
  };
  Whole merge(const std::vector<Part>& parts, const Tensor& targets, double gradient_scale,
              const Tensor& loss_sum) const;
  // Room for what travels, of N tokens.
  Tensor make_gradient(std::int64_t rows) const;
  Tensor make_sums(std::int64_t rows) const { return rank_->statistic({3 * rows}); }
  Tensor make_scale(std::int64_t rows) const { return rank_->statistic({rows}); }

  // Without gradients; `hidden` is on pipeline rank `from`, elsewhere room for it. Collective over pp and tp:
  // the summed loss (1, f64), or the last row's logits (1, V), on every rank.
  Tensor loss(const Tensor& hidden, const Tensor& targets, int from) const;
  Tensor logits(const Tensor& hidden, int from) const;

 private:
  int num_parts() const { return static_cast<int>(bounds_.size()) - 1; }
  // Makes a chunk's logits exponentials, and keeps their sums over the part.
  void add_up(const Tensor& logits, const Tensor& targets, const Tensor& sums, Range chunk) const;
  Tensor merged(const Tensor& sums, const Tensor& targets, const Tensor& scales, const Tensor& shares) const;

  const Rank* rank_;
  TensorParallel tensor_parallel_;
  VocabularyLogits logits_;           // of the part
  std::vector<std::int64_t> bounds_;  // first row of each part, and the end
};

}  // namespace echelon
