// Logits of a tp group that cuts the output layer by vocabulary (Megatron-LM,
// https://arxiv.org/abs/1909.08053, section 3). The loss needs no gathered logits: per token, only the
// maximum and then the sum of exponentials and the target's logit are reduced, 3 numbers instead of V. Logits
// exist for one chunk of tokens at a time, so the (N, V) matrix is never stored.
#pragma once

#include <algorithm>
#include <span>

#include "comm/rank.h"
#include "spec/model_spec.h"
#include "spec/plan.h"
#include "tensor/weight.h"

namespace echelon {

inline std::int64_t logits_rows_at_once(const Rank& rank, std::int64_t rows) {
  return std::min(rows,
                  logits_chunk_rows(rank.arena().stands_for(), element_bytes(rank.precision().activations)));
}

// All tp ranks iterate over the same chunks, since all hold whole rows here.
template <class Visit>
void for_each_logits_chunk(const Rank& rank, std::int64_t rows, const Visit& visit) {
  const std::int64_t each = logits_rows_at_once(rank, rows);
  for (std::int64_t begin = 0; begin < rows; begin += each) visit(Range{begin, std::min(begin + each, rows)});
}

// Rows of logits are padded to start at multiples of this many elements: matrix products are far slower on
// unaligned rows.
inline constexpr std::int64_t logits_row_alignment = 32;
inline std::int64_t logits_row_stride(std::int64_t columns) {
  return (columns + logits_row_alignment - 1) / logits_row_alignment * logits_row_alignment;
}

class VocabularyLogits {
 public:
  // weights: this rank's rows of `matrix` (the model's output matrix or a part of it), from `first_id` on,
  // and elements of its bias. blocks: the blocks of its rows in which sums over the vocabulary are taken;
  // empty: a single sum. `first`: a group of ranks that each hold a part of a tp rank's rows, or none of
  // them; nullptr: this rank holds all.
  VocabularyLogits(const Rank& rank, const ModelSpec& model, const ParamSpec& matrix, OutputWeights weights,
                   std::int64_t first_id, SumBlocks blocks = {}, Communicator* first = nullptr);

  const OutputWeights& weights() const { return weights_; }
  const Weight& table() const { return weights_.table; }  // (V_local, C): vocabulary rows from first_id() on
  std::int64_t first_id() const { return first_id_; }
  const SumBlocks& blocks() const { return blocks_; }
  double scale() const { return scale_; }  // multiplies logits
  double cap() const { return cap_; }      // soft cap of scaled logits; 0: none
  // Whether a softmax needs no other rank and no fixed order of its sums.
  bool is_whole() const { return blocks_.empty() && cut_.size() == 1 && first_ == nullptr; }

  // Allocates (chunk, V_local), wide, for chunks of N tokens, with rows logits_row_stride() apart.
  Tensor make_chunk(std::int64_t rows) const;
  // logits (N, V_local), wide = x (N, C) times the table, plus the bias, scaled and capped.
  void multiply(const Tensor& x, const Tensor& logits) const;
  // Of x and the logits' gradients (N, V_local): adds to gradients of weights().trained(), or overwrites.
  void add_weight_gradients(const Tensor& d_logits, const Tensor& x, std::span<const Tensor> gradients,
                            bool onto) const;

  // For each row (N, wide), over the tp group.
  struct Sums {
    Tensor max, sum, target;  // sum and target: of exp(logits - max), and the target's logit - max
  };
  // Replaces `logits` by exp(logits - max). targets (N, i32).
  Sums exponentials(const Tensor& logits, const Tensor& targets) const;

  // The logits (1, V of the matrix), wide, of x (1, C), gathered on every rank of the tp group.
  Tensor gathered(const Tensor& x) const;

  // A sum of losses (1, f64), zero.
  Tensor make_loss() const;

 private:
  void add_exponentials(const Tensor& logits, const Tensor& max, const Tensor& targets,
                        const Tensor& both) const;
  void sum(const Tensor& numbers, ReduceOp op) const;

  // In the dtype of logits.
  Tensor wide_bias() const;

  const Rank* rank_;
  OutputWeights weights_;
  std::int64_t first_id_;
  std::vector<std::int64_t> cut_;  // rows of the matrix on each tp rank
  double scale_, cap_;
  SumBlocks blocks_;
  Communicator* first_;
};

}  // namespace echelon
