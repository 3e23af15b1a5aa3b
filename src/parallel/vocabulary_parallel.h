// The embedding table and the output layer cut by vocabulary (Megatron-LM, https://arxiv.org/abs/1909.08053,
// section 3). Lookup: each rank answers for its own rows of the table, the others stay zero, and the sum over
// ranks is the whole answer. Output layer with cross-entropy: logits are never gathered. Per token the
// maximum, then the sum of exponentials and the target's logit are all that travels: 3 numbers instead of V.
// Logits live for one chunk of tokens at a time, and their gradient takes their place, so the (N, V) matrix
// is never stored and never computed twice.
#pragma once

#include "layer/norm.h"
#include "layer/weight.h"
#include "parallel/faults.h"
#include "parallel/tensor_parallel.h"
#include "spec/plan.h"

namespace echelon {

class VocabularyEmbedding {
 public:
  // table (V_local, C) holds vocabulary rows from first_id on.
  VocabularyEmbedding(const Rank& rank, TensorParallel tensor_parallel, Weight table, std::int64_t first_id)
      : rank_(&rank), tensor_parallel_(tensor_parallel), table_(table), first_id_(first_id) {}

  // ids (N, i32) -> (N, C), of which the sum over the ranks is the answer.
  Tensor forward(const Tensor& ids) const;
  // dy: of that sum in the residual stream (rows_here, C).
  void backward(const Tensor& ids, const Tensor& dy) const;

 private:
  const Rank* rank_;
  TensorParallel tensor_parallel_;
  Weight table_;
  std::int64_t first_id_;
};

class OutputHead {
 public:
  // table (V_local, C): vocabulary rows from first_id on.
  OutputHead(const Rank& rank, TensorParallel tensor_parallel, Norm norm, Weight table, std::int64_t first_id)
      : rank_(&rank), tensor_parallel_(tensor_parallel), norm_(norm), table_(table), first_id_(first_id) {}

  struct Result {
    Tensor loss_sum;  // (1, f64): of -log p(target) over the targets that are not ignored
    Tensor dx;  // gradient of gradient_scale * loss_sum, in the residual stream; undefined without a gradient
  };
  // x: residual stream (rows_here, C); targets (N, i32), negative = ignored. Adds to the parameter gradients.
  Result loss_and_gradient(const Tensor& x, const Tensor& targets, double gradient_scale) const;
  double loss(const Tensor& x, const Tensor& targets) const;
  // Logits (rows, V_local) of the last `rows` rows of x; without sequence parallelism only.
  Tensor logits(const Tensor& x, std::int64_t rows) const;

 private:
  struct Normed {
    Tensor stats;
    Tensor whole;  // (N, C)
  };
  Normed norm(const Tensor& x, std::int64_t rows) const;
  Tensor no_loss() const;  // (1, f64), 0
  // Leaves exp(logits - max) in `logits` and their global sums in the returned vector; adds to loss_sum.
  Tensor softmax_sums(const Tensor& logits, const Tensor& targets, const Tensor& loss_sum) const;

  const Rank* rank_;
  TensorParallel tensor_parallel_;
  Norm norm_;
  Weight table_;
  std::int64_t first_id_;
};

}  // namespace echelon
