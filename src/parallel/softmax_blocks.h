// Under invariant numerics, a softmax over the vocabulary that gives the same bits however its columns are
// spread, so that pipeline ranks may share it (vocabulary parallelism). Each block of the vocabulary
// (spec/sum_blocks.h) has its own maximum and sum of exponentials, which suffice for its products; the
// results are scaled once all blocks are known. The gradient of the input is a tree sum over the blocks. Each
// term is the block's exponentials times its rows of the table, scaled, minus the target's row if the block
// contains it.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "spec/param_spec.h"
#include "spec/plan.h"
#include "tensor/kernels.h"

namespace echelon {

// Whether a run uses this softmax: under invariant numerics, for models whose output layer may be cut over
// the pipeline.
bool is_softmax_in_blocks(const Plan& plan);

class SoftmaxBlocks {
 public:
  // matrix: the model's output matrix. table: the part that this rank holds, which is blocks `here` of all,
  // in order.
  SoftmaxBlocks(const Rank& rank, const ParamSpec& matrix, Tensor table, Range here);

  Range here() const { return here_; }
  std::int64_t count() const { return here_.size(); }  // number of blocks here
  std::int64_t all() const { return std::ssize(bounds_) - 1; }
  // The vocabulary ids of any block.
  Range ids(std::int64_t block) const {
    const auto at = static_cast<std::size_t>(block);
    return {bounds_[at], bounds_[at + 1]};
  }
  // The columns of one of the blocks here, among those here.
  Range columns(std::int64_t block) const;

  // Replaces logits (N, V_local) by exponentials. Returns for each block here its maxima, sums and targets'
  // logits: 3 N, wide.
  Tensor add_up(const Tensor& logits, const Tensor& targets) const;
  // Merges these numbers of all blocks, in order: into what the loss needs (N each), and the divisors of each
  // block's exponentials (N per block).
  struct Whole {
    Tensor sum, target, scales;
  };
  Whole merge(const Tensor& numbers, const Tensor& targets) const;

  // y (N, C), wide = a block's exponentials times its rows. `rounded`: exponentials, rounded to the dtype of
  // products.
  void multiply(std::int64_t block, const Tensor& rounded, const Tensor& y) const;
  Tensor rounded(const Tensor& exponentials) const;
  // The targets' rows of the table, (N, C), wide: zero for targets outside this block.
  Tensor target_rows(std::int64_t block, const Tensor& targets) const;
  // A block's term of the gradient: y = factor (product / scales - of_target); zero for ignored targets.
  void make_term(const Tensor& product, const Tensor& scales, const Tensor& of_target, const Tensor& targets,
                 double factor, const Tensor& y) const;
  // Gradients of the logits here, from exponentials and the scales of each block here. `first`: the first row
  // of `scales` to use. d_logits may be `exponentials` itself if both have the same width.
  void make_gradients(const Tensor& exponentials, const Tensor& scales, const Tensor& targets, double factor,
                      const Tensor& d_logits, std::int64_t first = 0) const;

 private:
  std::int64_t first_id(std::int64_t block) const {
    return bounds_[static_cast<std::size_t>(here_.begin + block)];
  }

  const Rank* rank_;
  Tensor table_;
  Range here_;
  std::vector<std::int64_t> bounds_;  // ids at which blocks begin, and the end
};

}  // namespace echelon
