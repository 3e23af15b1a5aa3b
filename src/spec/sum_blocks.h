// Under invariant numerics (docs/invariance.md), a sum over a dimension that tensor parallelism cuts is
// computed in blocks. The blocks depend on the model alone, and every rank holds whole ones.
#pragma once

#include <vector>

#include "spec/param_spec.h"

namespace echelon {

// The number of blocks of parameters that are used as one matrix: the largest power of two, up to 8, that
// cuts each of their pieces in whole units and whose cuts include those into fewer powers of two. 1 if a
// parameter is not cut.
int num_sum_blocks(const std::vector<ParamSpec>& list);

// The blocks of rank `index` of `tp`, which must divide their number (InvariantError). For each block, its
// ranges within what the rank holds of these parameters, one parameter after another.
std::vector<std::vector<Range>> sum_blocks(const std::vector<ParamSpec>& list, int tp, int index);

}  // namespace echelon
