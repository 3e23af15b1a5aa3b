// ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): the state that plain data parallelism
// holds once on every rank is cut over the ranks. A stage says where things live; the optimizer and its
// arithmetic stay as they are, and so do the bits of the result.
//
//   stage  cut over s ranks                   a step sends, per rank        bytes kept, N parameters
//   1      moments                            (s-1)/s of the gradients      values N, gradients N, moments
//   2N/s 2      moments, gradients                 (reduce_scatter) and of the   values N, the rest 3N/s
//                                             values (all_gather)
//
// Each rank updates its own shard and hands the new values round. How things are cut: spec/shard_layout.h.
// HSDP (FSDP's hybrid sharding, Zhao et al. 2023, https://arxiv.org/abs/2304.11277): s is less than the
// data-parallel size, and blocks of s neighbouring ranks are replicas of each other.
#pragma once

#include <vector>

#include "comm/rank.h"

namespace echelon {

// A unit of the shard layout as one rank holds it.
struct ShardedUnit {
  Tensor whole, own;                 // flat; own may be its place inside whole
  std::vector<std::int64_t> counts;  // elements of each rank's part
};

// Every rank's own part goes to all ranks of the block.
void all_gather_units(Communicator& block, const std::vector<ShardedUnit>& units);

}  // namespace echelon
