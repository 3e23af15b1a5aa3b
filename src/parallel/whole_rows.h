// Under invariant numerics, the gradient of a weight is a sum over whole sequences in token order
// (tensor/sequence_sums.h). If the tokens of a sequence are cut over n ranks (context parallelism, and
// sequence parallelism for parameters that each tp rank holds whole), each rank gets all rows of a part of
// the weight's columns, or rows, and sums that part; it contributes zero to the others, and the sum over the
// ranks that follows anyway completes them. The work stays balanced.
//
// Bytes that a rank sends: (n-1)/n of the elements of its rows for operands that are cut, and n-1 times all
// of them for those that are not.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "spec/context_layout.h"
#include "spec/plan.h"
#include "tensor/sequence_sums.h"

namespace echelon {

// The rows of a run of positions, from those (T, C) of a whole sequence; the run's stride divides T.
Tensor rows_at(const Tensor& sequence, const PositionRun& run);

class WholeRows final : public SpreadRows {
 public:
  // `rank` outlives this.
  WholeRows(const Rank& rank, const Plan& plan);

  bool are_cut() const { return cp_ > 1 || sequence_parallel_; }
  // Collective over both groups.
  Tensor gather(const Tensor& here, std::int64_t rows, bool all_rows) const override;
  Tensor gather_part(const Tensor& here, std::int64_t rows, bool all_rows) const override;
  Range part(std::int64_t columns, bool all_rows) const override;
  // Reorders all rows of sequences from rank order (one cp rank after another) to position order, and back.
  Tensor in_order(const Tensor& by_rank) const;
  Tensor by_rank(const Tensor& in_order) const;
  // This rank's rows of a sum over the cp ranks, each of which has a term (all rows, C).
  Tensor sum_here(const Tensor& term) const;
  // Gathers the rows of a group in rank order, `rows` of them on each: all columns, or this rank's part of
  // them.
  Tensor all_of(Communicator& group, const Tensor& here, const std::vector<std::int64_t>& rows) const;
  Tensor part_of_all(Communicator& group, const Tensor& here, const std::vector<std::int64_t>& rows) const;

 private:
  // Rows of a sequence that are neighbours on a cp rank, and their positions.
  struct Run {
    std::int64_t rank = 0, begin = 0;
    PositionRun at;
  };
  std::vector<std::int64_t> tp_rows(std::int64_t rows) const;
  std::vector<std::int64_t> cp_rows(std::int64_t rows) const;
  bool crosses_tp(bool all_rows) const { return sequence_parallel_ && !all_rows; }
  template <class Move>
  void each_run(std::int64_t batch, const Move& move) const;
  Tensor like(const Tensor& x, std::int64_t rows, std::int64_t columns) const;

  const Rank* rank_;
  bool sequence_parallel_;
  int cp_;
  std::int64_t tokens_, seq_len_;  // of a sequence: on this rank and in all
  std::vector<Run> runs_;
  bool follow_ = true;  // each rank's rows follow those of the rank before
};

}  // namespace echelon
