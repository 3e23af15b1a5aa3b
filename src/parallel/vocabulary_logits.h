// Logits of a tp group that cuts the output layer by vocabulary (Megatron-LM,
// https://arxiv.org/abs/1909.08053, section 3). They are never gathered for the loss: per token the maximum,
// then the sum of exponentials and the target's logit are all that travels, 3 numbers instead of V. They live
// for one chunk of tokens at a time, so that the (N, V) matrix is never stored.
#pragma once

#include <algorithm>

#include "comm/rank.h"
#include "spec/model_spec.h"
#include "spec/plan.h"
#include "tensor/weight.h"

namespace echelon {

inline std::int64_t logits_rows_at_once(const Rank& rank, std::int64_t rows) {
  return std::min(rows, logits_chunk_rows(rank.arena().stands_for()));
}

// Every tp rank walks the same chunks, since all hold whole rows here.
template <class Visit>
void for_each_logits_chunk(const Rank& rank, std::int64_t rows, const Visit& visit) {
  const std::int64_t each = logits_rows_at_once(rank, rows);
  for (std::int64_t begin = 0; begin < rows; begin += each) visit(Range{begin, std::min(begin + each, rows)});
}

// Room for rows of so many columns, which begin at multiples of so many elements: products read and write
// rows that begin at odd addresses far more slowly.
inline constexpr std::int64_t logits_row_alignment = 32;
inline std::int64_t logits_row_stride(std::int64_t columns) {
  return (columns + logits_row_alignment - 1) / logits_row_alignment * logits_row_alignment;
}

class VocabularyLogits {
 public:
  // table: what this rank holds of `matrix`, the model's output matrix or a part of it, from `first_id` on.
  // blocks: of its rows, in which sums over the vocabulary are taken; empty: as one. `first`: ranks that each
  // have a part of a tp rank's rows, or none of them, beside each other; nullptr: one has all.
  VocabularyLogits(const Rank& rank, const ModelSpec& model, const ParamSpec& matrix, Weight table,
                   std::int64_t first_id, SumBlocks blocks = {}, Communicator* first = nullptr);

  const Weight& table() const { return table_; }  // (V_local, C): vocabulary rows from first_id() on
  std::int64_t first_id() const { return first_id_; }
  const SumBlocks& blocks() const { return blocks_; }
  double scale() const { return scale_; }  // of the logits
  double cap() const { return cap_; }      // of the scaled ones; 0: none
  // Whether a softmax asks no other rank, and no order of its sums.
  bool is_whole() const { return blocks_.empty() && cut_.size() == 1 && first_ == nullptr; }

  // (chunk, V_local) wide, for chunks of N tokens, rows logits_row_stride() apart.
  Tensor make_chunk(std::int64_t rows) const;
  // x (N, C); logits (N, V_local) wide.
  void multiply(const Tensor& x, const Tensor& logits) const;

  // Of each row (N, wide), over the tp group.
  struct Sums {
    Tensor max, sum, target;  // the last two of exp(logits - max), and the target's logit - max
  };
  // Leaves exp(logits - max) in `logits`. targets (N, i32).
  Sums exponentials(const Tensor& logits, const Tensor& targets) const;

  // Of the tp group, for x (1, C): (1, V of the matrix) wide, on every rank.
  Tensor gathered(const Tensor& x) const;

  // A sum of losses (1, f64) that is 0.
  Tensor make_loss() const;

 private:
  void add_exponentials(const Tensor& logits, const Tensor& max, const Tensor& targets,
                        const Tensor& both) const;
  void sum(const Tensor& numbers, ReduceOp op) const;

  const Rank* rank_;
  Weight table_;
  std::int64_t first_id_;
  std::vector<std::int64_t> cut_;  // rows of the matrix on each rank of the tp group
  double scale_, cap_;
  SumBlocks blocks_;
  Communicator* first_;
};

}  // namespace echelon
