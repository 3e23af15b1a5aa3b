// Tensor parallelism (Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053): the matrix
// products of attention and MLP are cut over the tp group, the first by columns, the second by rows, with no
// communication between them.
//
//   residual --enter--> R  [column-parallel: Y = X A_r]  [heads or activation]  [row-parallel: Z_r = Y B_r]
//   P --leave--> residual
//
// enter and leave are rows of the conjugate table: I -> R and P -> I (one all_reduce in backward, one in
// forward), or S(0) -> R and P -> S(0) under sequence parallelism. Attention and MLP each enter and leave
// once per layer. Bytes sent per rank, layer and direction: 2 x 2(t-1)/t x N x C elements; under sequence
// parallelism half as much again in backward, where InputAgain gathers.
#pragma once

#include <utility>

#include "parallel/redistribute.h"
#include "parallel/sequence_parallel.h"

namespace echelon {

class TensorParallel {
 public:
  TensorParallel(const Rank& rank, bool sequence_parallel)
      : rank_(&rank), sequence_parallel_(sequence_parallel && rank.size(Axis::tp) > 1) {}

  int size() const { return rank_->size(Axis::tp); }
  int index() const { return rank_->coordinate(Axis::tp); }
  bool sequence_parallel() const { return sequence_parallel_; }
  // The rows of an N-row residual stream that this rank holds.
  Range rows_here(std::int64_t rows) const {
    return residual_rows(sequence_parallel_, rows, size(), index());
  }

  // From the residual stream (rows_here, C) to the whole input (N, C) of column-parallel products; and its
  // gradient back.
  InFlight enter(const Tensor& x, std::int64_t rows) const { return move(x, residual(), replicated, rows); }
  InFlight enter_backward(const Tensor& dx, std::int64_t rows) const {
    return move(dx, partial, residual(), rows);
  }
  // From partial sums (N, C) of row-parallel products to the residual stream; and its gradient back.
  InFlight leave(const Tensor& x, std::int64_t rows) const { return move(x, partial, residual(), rows); }
  InFlight leave_backward(const Tensor& dx, std::int64_t rows) const {
    return move(dx, residual(), replicated, rows);
  }
  // Sums in place what each rank has of sums over cut columns: P -> R. The gradient of the sum goes the same
  // way: one all_reduce forward and one backward.
  void add_up(const Tensor& sums) const {
    redistribute(*rank_, Axis::tp, sums, partial, replicated, {sums.rows(), sums.cols()}).get();
  }

 private:
  Placement residual() const { return residual_placement(sequence_parallel_); }
  InFlight move(const Tensor& x, const Placement& from, const Placement& to, std::int64_t rows) const {
    return redistribute(*rank_, Axis::tp, x, from, to, {rows, x.cols()});
  }

  const Rank* rank_;
  bool sequence_parallel_;
};

// The whole input (N, C) of column-parallel products once more, for the gradients of their weights. Saved are
// only the rows of the residual stream that this rank holds; under sequence parallelism the others are
// gathered again, from begin() on or on first use: an all_gather that saves (t-1)/t of the memory
// (Korthikanti et al. 2022, section 4.2.2).
class InputAgain {
 public:
  InputAgain(TensorParallel tensor_parallel, Tensor here, std::int64_t rows)
      : tensor_parallel_(tensor_parallel), rows_(rows), here_(std::move(here)) {}

  const Tensor& here() const { return here_; }
  // Collective over the tp group.
  void begin() {
    arriving_ = tensor_parallel_.enter(here_, rows_);
    is_begun_ = true;
  }
  const Tensor& whole() {
    if (!is_begun_) begin();
    if (!whole_.defined()) whole_ = arriving_.get();
    return whole_;
  }

 private:
  TensorParallel tensor_parallel_;
  std::int64_t rows_;
  bool is_begun_ = false;
  InFlight arriving_;
  Tensor here_, whole_;
};

}  // namespace echelon
