// Under invariant numerics, a softmax over the vocabulary that pipeline ranks can share out (vocabulary
// parallelism), wherever its columns lie. Each block of the vocabulary (spec/sum_blocks.h) has its own
// maximum and sum of exponentials, which are all that its products need; what is known of all blocks scales
// what they made. The gradient of the input is a sum over the blocks, by the tree, each term made of a
// block's exponentials times its rows of the table, scaled, less the target's row where the block has it.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "spec/param_spec.h"
#include "spec/plan.h"
#include "tensor/kernels.h"

namespace echelon {

// Whether a run's softmax is such a one: under invariant numerics, of models whose output layer the
// pipeline's ranks can have in parts.
bool is_softmax_in_blocks(const Plan& plan);

class SoftmaxBlocks {
 public:
  // matrix: the model's output matrix. table: what this rank has of it, blocks `here` of all, one after
  // another.
  SoftmaxBlocks(const Rank& rank, const ParamSpec& matrix, Tensor table, Range here);

  Range here() const { return here_; }
  std::int64_t count() const { return here_.size(); }  // of the blocks here
  std::int64_t all() const { return std::ssize(bounds_) - 1; }
  // Of any block.
  Range ids(std::int64_t block) const {
    const auto at = static_cast<std::size_t>(block);
    return {bounds_[at], bounds_[at + 1]};
  }
  // Of a block here: its columns among those here.
  Range columns(std::int64_t block) const;

  // Makes logits (N, V_local) exponentials. Returns for each block here maxima, sums and targets' logits,
  // 3 N wide.
  Tensor add_up(const Tensor& logits, const Tensor& targets) const;
  // Of those of all blocks in order: what the loss is of (N each), and what each block's exponentials are to
  // be divided by (all N).
  struct Whole {
    Tensor sum, target, scales;
  };
  Whole merge(const Tensor& numbers, const Tensor& targets) const;

  // A block's exponentials times its rows: y (N, C) wide. `rounded`: exponentials as products take them.
  void multiply(std::int64_t block, const Tensor& rounded, const Tensor& y) const;
  Tensor rounded(const Tensor& exponentials) const;
  // The targets' rows of a block here, of others zero: (N, C) wide.
  Tensor target_rows(std::int64_t block, const Tensor& targets) const;
  // A block's term of the gradient: y = factor (product / scales - of_target), zero where a target is
  // ignored.
  void make_term(const Tensor& product, const Tensor& scales, const Tensor& of_target, const Tensor& targets,
                 double factor, const Tensor& y) const;
  // Gradients of the logits here from exponentials, rows from `first` on of those that scales (of each block
  // here) are of. d_logits may be these where they are as wide.
  void make_gradients(const Tensor& exponentials, const Tensor& scales, const Tensor& targets, double factor,
                      const Tensor& d_logits, std::int64_t first = 0) const;

 private:
  std::int64_t first_id(std::int64_t block) const {
    return bounds_[static_cast<std::size_t>(here_.begin + block)];
  }

  const Rank* rank_;
  Tensor table_;
  Range here_;
  std::vector<std::int64_t> bounds_;  // of all blocks: ids
};

}  // namespace echelon
