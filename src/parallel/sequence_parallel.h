// Sequence parallelism (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198): between tensor-parallel
// regions, the tokens of a microbatch are cut over the tp group, so that norms, residuals and their saved
// activations shrink by tp. Each all_reduce of tensor parallelism becomes a reduce_scatter and an all_gather:
// the same bytes. The regions' inputs, which weight gradients need, are also saved sharded and gathered once
// more (InputAgain).
#pragma once

#include "base/split.h"
#include "comm/rank.h"
#include "spec/layout.h"

namespace echelon {

// Placement of the residual stream along tp: S(0) under sequence parallelism, else I.
Placement residual_placement(bool sequence_parallel);

// The rows of an N-row residual stream that rank `index` of `tp` holds.
Range residual_rows(bool sequence_parallel, std::int64_t rows, int tp, int index);

// Sums partial gradients over tp, in place: those of parameters that every tp rank applied to its own rows
// only (norms, learned positions, row-parallel biases) or to its own heads. Forgetting this is the classic
// silent error of sequence parallelism.
void reduce_partial_gradients(const Rank& rank, const Tensor& gradients);

}  // namespace echelon
