#include "parallel/sequence_parallel.h"

namespace echelon {

Placement residual_placement(bool sequence_parallel) { return sequence_parallel ? sharded(0) : identical; }

Range residual_rows(bool sequence_parallel, std::int64_t rows, int tp, int index) {
  return sequence_parallel ? split_range(rows, tp, index) : Range{0, rows};
}

void reduce_partial_gradients(const Rank& rank, const Tensor& gradients) {
  if (gradients.numel() > 0) rank.along(Axis::tp).all_reduce(gradients).wait();
}

}  // namespace echelon
