// The counterpart of whole_rows.h for the copies of tokens that experts get, if all experts are on every rank
// and context parallelism cuts sequences. Each rank sums a part of the columns of every expert's gradient,
// over the copies of whole sequences in token order. Ranks first exchange how many copies each has: a number
// for each expert, sequence and run of positions.
#pragma once

#include <vector>

#include "parallel/whole_rows.h"
#include "spec/traffic.h"
#include "tensor/expert_products.h"

namespace echelon {

// The runs of neighbouring positions of a sequence, in order: which cp rank has each, and which of its own
// runs it is. All have the same size, as sequences divide (ContextLayout).
struct PositionRuns {
  struct Place {
    int cp_rank = 0, run = 0;
  };
  PositionRuns() = default;  // one run, on one rank
  explicit PositionRuns(const Plan& plan);
  std::vector<Place> order{Place{}};
  int of_rank = 1, ranks = 1;
};

class WholeCopies {
 public:
  // Collective over cp. `by_run`: bounds of this rank's copies for each expert, sequence and run. Adds what
  // it sends to `moved`, which outlives it.
  WholeCopies(const Rank& rank, const PositionRuns& runs, const ExpertBounds& by_run, std::int64_t sequences,
              MovedCopies& moved);

  // Bounds of each expert's copies, by sequence.
  const ExpertBounds& of_sequences() const { return of_sequences_; }
  // All copies (N, C), from this rank's `here` (rows after these are ignored); or this rank's part of their
  // columns.
  Tensor gather(const WholeRows& rows, const Tensor& here) const;
  Tensor gather_part(const WholeRows& rows, const Tensor& here) const;

 private:
  Tensor in_order(const Tensor& by_rank) const;

  const Rank* rank_;
  MovedCopies* moved_;
  std::vector<std::int64_t> counts_;  // copies on each rank
  ExpertBounds of_sequences_{0};
  Tensor places_;  // (all copies, i32): their places in rank order
};

}  // namespace echelon
