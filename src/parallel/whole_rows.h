// Under invariant numerics a gradient of a weight is a sum over whole sequences, in the order of their tokens
// (tensor/sequence_sums.h). Where the tokens of a sequence are cut over ranks (context parallelism, and
// sequence parallelism for what each tp rank holds whole), their rows travel to one rank, which adds up the
// whole gradient; the others have nothing of it, and the sum over the ranks that follows in any case brings it
// to all. Which rank differs from weight to weight, so that each has a share of the work.
//
// Bytes that a rank sends: all rows that it has of what a gradient is made of, to another rank for (n-1)/n of
// the weights.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "spec/context_layout.h"
#include "spec/plan.h"
#include "tensor/weight.h"

namespace echelon {

class WholeRows {
 public:
  // `rank` outlives this. Under context parallelism heads are exchanged (ContextKind::ulysses), so that the
  // tokens of a rank follow each other.
  WholeRows(const Rank& rank, const Plan& plan);

  bool are_cut() const { return cp_ > 1 || sequence_parallel_; }
  // A matrix, or a vector with one element of each row, with the rows here, to `rows` of them in order on the
  // rank whose weight it is; undefined on the others. All ranks of both groups call this alike.
  Tensor bring(const Tensor& here, std::int64_t rows, const Weight& weight) const;
  // Of a matrix with all rows of a microbatch those that are here under context parallelism.
  Tensor here(const Tensor& whole) const;

 private:
  Tensor to_one(Communicator& group, const Tensor& here, const std::vector<std::int64_t>& rows,
                const Weight& weight) const;
  Tensor in_order(const Tensor& by_rank) const;

  const Rank* rank_;
  bool sequence_parallel_;
  int cp_;
  std::int64_t tokens_;  // of a sequence, here
};

}  // namespace echelon
