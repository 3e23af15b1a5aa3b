// What whole_rows.h is for tokens, for the copies that a mixture's experts get of them, where all experts are
// here and context parallelism cuts sequences: each rank adds up a part of the columns of every expert's
// gradient, over the copies of whole sequences in the order of their tokens. How many copies a rank has is
// told first: a number for each expert, sequence and run of positions.
#pragma once

#include <vector>

#include "parallel/whole_rows.h"
#include "spec/traffic.h"
#include "tensor/expert_products.h"

namespace echelon {

// Runs of neighbouring positions that a sequence's tokens are in, in the order of their positions: which rank
// of the cp group has each, and which of its own runs it is. All are of one size, as sequences divide
// (ContextLayout).
struct PositionRuns {
  struct Place {
    int cp_rank = 0, run = 0;
  };
  PositionRuns() = default;  // one, on one rank
  explicit PositionRuns(const Plan& plan);
  std::vector<Place> order{Place{}};
  int of_rank = 1, ranks = 1;
};

class WholeCopies {
 public:
  // Collective over cp. `by_run`: bounds of the copies here of each expert, sequence and run. Adds what it
  // sends to `moved`, which outlives it.
  WholeCopies(const Rank& rank, const PositionRuns& runs, const ExpertBounds& by_run, std::int64_t sequences,
              MovedCopies& moved);

  // Bounds of each expert's copies of each sequence.
  const ExpertBounds& of_sequences() const { return of_sequences_; }
  // All copies (N, C) from those here, behind which others are not read; or this rank's part of their
  // columns.
  Tensor gather(const WholeRows& rows, const Tensor& here) const;
  Tensor gather_part(const WholeRows& rows, const Tensor& here) const;

 private:
  Tensor in_order(const Tensor& by_rank) const;

  const Rank* rank_;
  MovedCopies* moved_;
  std::vector<std::int64_t> counts_;  // copies on each rank
  ExpertBounds of_sequences_{0};
  Tensor places_;  // (all copies, i32): where each is among those of one rank after another
};

}  // namespace echelon
