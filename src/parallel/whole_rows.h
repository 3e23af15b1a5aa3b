// Under invariant numerics a gradient of a weight is a sum over whole sequences, in the order of their tokens
// (tensor/sequence_sums.h). Where the tokens of a sequence are cut over ranks (context parallelism, and
// sequence parallelism for what each tp rank holds whole), each of n ranks takes all rows of a part of the
// weight's columns, or of its rows, and adds up that part; the others have nothing of it, and the sum over
// the ranks that follows in any case brings it to all. So all have the same work at any time.
//
// Bytes that a rank sends: of what is cut (n-1)/n of its rows' elements, of what is not n-1 times all.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "spec/context_layout.h"
#include "spec/plan.h"
#include "tensor/sequence_sums.h"

namespace echelon {

// The rows of a run of positions among those (T, C) of a whole sequence, of which a stride divides T.
Tensor rows_at(const Tensor& sequence, const PositionRun& run);

class WholeRows final : public SpreadRows {
 public:
  // `rank` outlives this.
  WholeRows(const Rank& rank, const Plan& plan);

  bool are_cut() const { return cp_ > 1 || sequence_parallel_; }
  // All ranks of both groups call these alike.
  Tensor gather(const Tensor& here, std::int64_t rows, bool all_rows) const override;
  Tensor gather_part(const Tensor& here, std::int64_t rows, bool all_rows) const override;
  Range part(std::int64_t columns, bool all_rows) const override;
  // All rows of sequences of which those of one rank of the cp group after another are given, and back.
  Tensor in_order(const Tensor& by_rank) const;
  Tensor by_rank(const Tensor& in_order) const;
  // Of a sum over the cp ranks (all rows, C), each of which has a term, the rows that are here.
  Tensor sum_here(const Tensor& term) const;
  // The rows of one rank of a group after another, so many on each: all columns, or this rank's part.
  Tensor all_of(Communicator& group, const Tensor& here, const std::vector<std::int64_t>& rows) const;
  Tensor part_of_all(Communicator& group, const Tensor& here, const std::vector<std::int64_t>& rows) const;

 private:
  // Rows of a sequence that are neighbours on a rank of the cp group, and where they stand.
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
  std::int64_t tokens_, seq_len_;  // of a sequence, here and in all
  std::vector<Run> runs_;
  bool follow_ = true;  // the rows of one rank behind those of another
};

}  // namespace echelon
