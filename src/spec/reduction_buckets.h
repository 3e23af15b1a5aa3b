// The pieces in which a rank reduces its gradients over its data-parallel group. The trainer, its parameter
// store, and the memory and traffic predictions read this.
#pragma once

#include <vector>

#include "spec/compression.h"
#include "spec/plan.h"

namespace echelon {

// The buckets in the order in which they are reduced; `groups` are the rank's layer groups. Without ZeRO: see
// gradient_buckets(). With ZeRO: the units of shard_units() that are not empty, the last layer group first
// and its experts after it, the whole parameters at the end; each with the shards of the ranks.
std::vector<GradientBucket> reduction_buckets(const Plan& plan,
                                              const std::vector<std::vector<ParamSpec>>& groups, int tp_rank);

}  // namespace echelon
