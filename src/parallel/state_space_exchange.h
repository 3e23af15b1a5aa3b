// Context parallelism of layers with a state space (Dao & Gu 2024, https://arxiv.org/abs/2405.21060, section
// 8; what Megatron-Core does for Mamba): an all-to-all takes each rank of the cp group from its tokens of all
// heads to all tokens of its part of the heads, the convolution and the scan need no communication there, and
// another one brings the output back. It is over the whole group and by positions, so it is the same wherever
// attention of other layers has its tokens (spec/context_layout.h).
//
// Bytes that a rank sends in each: (cp-1)/cp of its rows of the matrix; with fewer groups than ranks each
// rank that has heads of one gets a copy of its B and C, and their gradient is the sum of theirs.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "parallel/whole_rows.h"
#include "tensor/kernels.h"

namespace echelon {

class StateSpaceExchange {
 public:
  // Of each rank the columns of a matrix that it gets: as many on each.
  using Columns = std::vector<std::vector<Range>>;

  // `rank` outlives this. `all`: of this tp rank.
  StateSpaceExchange(const Rank& rank, const Plan& plan, const StateSpaceShape& all);

  const StateSpaceShape& here() const { return here_; }  // that this rank scans
  // Of all heads, and of [x | B | C] and its parts, those that are here.
  Range heads() const { return heads_of(rank_->coordinate(Axis::cp)); }
  std::vector<Range> mixed() const { return mixed_of(rank_->coordinate(Axis::cp)); }

  // [z | x | B | C | dt], by the delta rule with beta behind, of the tokens here to that of the heads here;
  // the gradient of the latter back.
  Tensor to_heads(const Tensor& given) const { return to_heads(given, given_); }
  void gradient_to_tokens(const Tensor& gradient, const Tensor& to) const {
    return to_tokens(gradient, given_, to);
  }
  // What comes of it (rows, channels) back; its gradient there.
  void output_to_tokens(const Tensor& y, const Tensor& to) const { return to_tokens(y, made_, to); }
  Tensor output_gradient_to_heads(const Tensor& dy) const { return to_heads(dy, made_); }

 private:
  Range heads_of(int rank) const;
  std::vector<Range> mixed_of(int rank) const;
  Tensor to_heads(const Tensor& x, const Columns& columns) const;
  void to_tokens(const Tensor& core, const Columns& columns, const Tensor& x) const;

  const Rank* rank_;
  StateSpaceShape all_, here_;  // of no rows
  WholeRows rows_;
  Columns given_, made_;
};

}  // namespace echelon
