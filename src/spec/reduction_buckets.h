// The pieces in which a rank's gradients are summed over its data-parallel group. Read by the trainer, its
// parameter store, and the memory and traffic predictions.
#pragma once

#include <vector>

#include "spec/compression.h"
#include "spec/plan.h"

namespace echelon {

// In the order in which they are reduced; `groups` are the rank's layer groups. Without ZeRO: see
// gradient_buckets(). With it the units of shard_units() that hold anything, the last layer group first, its
// experts after it, and the whole parameters at the end, and the shard of each rank of a block.
std::vector<GradientBucket> reduction_buckets(const Plan& plan,
                                              const std::vector<std::vector<ParamSpec>>& groups, int tp_rank);

}  // namespace echelon
