// Sequence parallelism (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198): between the
// tensor-parallel regions the tokens of a microbatch are cut over the tp group, so that norms, residuals and
// their saved activations shrink by tp. Each all_reduce of tensor parallelism becomes reduce_scatter +
// all_gather: the same bytes. The inputs of the regions, which weight gradients read, are kept cut as well,
// and gathered once more (InputAgain).
#pragma once

#include "base/split.h"
#include "comm/rank.h"
#include "spec/layout.h"

namespace echelon {

// Where the residual stream lives along tp: S(0), its rows cut over the ranks, or I.
Placement residual_placement(bool sequence_parallel);

// Rows of an N-row residual stream that rank `index` of a tp group of `tp` holds.
Range residual_rows(bool sequence_parallel, std::int64_t rows, int tp, int index);

// Parameters that every tp rank applied to its own rows only (norms, learned positions, row-parallel biases),
// or to its own heads, hold partial gradients: sums them over tp, in place. Forgetting this is the classic
// silent error of sequence parallelism.
void reduce_partial_gradients(const Rank& rank, const Tensor& gradients);

}  // namespace echelon
