// The blocks in which a sum over a dimension that tensor parallelism cuts is taken under invariant numerics
// (docs/invariance.md): they depend on the model alone, and every rank has whole ones.
#pragma once

#include <vector>

#include "spec/param_spec.h"

namespace echelon {

// Of parameters that are used as one matrix: a power of two, the largest up to 8 into which each of their
// pieces is cut in whole units, such that the cuts into fewer are among its own. 1 where one is not cut.
int num_sum_blocks(const std::vector<ParamSpec>& list);

// Those of rank `index` of `tp`, which divides their number: for each block its ranges among what the rank
// holds of these parameters, one parameter after another.
std::vector<std::vector<Range>> sum_blocks(const std::vector<ParamSpec>& list, int tp, int index);

}  // namespace echelon
