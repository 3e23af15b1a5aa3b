// How ZeRO shards a rank's parameters, gradients and optimizer state over a group of data-parallel ranks. The
// trainer's parameter store and the memory and traffic predictions read this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "spec/flat_layout.h"

namespace echelon {

// How many ranks state is sharded over, or a rank's index among them: for what all ranks of dp x cp hold
// alike, and for routed experts.
struct Shards {
  int all = 0, experts = 0;
};

// A piece of the flat order that is gathered, reduced and freed as one: a layer group's cut parameters, its
// routed experts, or all whole parameters.
struct ShardUnit {
  Range range;
  bool experts = false;
  // Shard i is [bounds[i], bounds[i + 1]); the first and last bound are the range's.
  std::vector<std::int64_t> bounds;

  int of(const Shards& s) const { return experts ? s.experts : s.all; }
  Range shard(const Shards& index) const { return shard(of(index)); }
  Range shard(int i) const {
    return {bounds[static_cast<std::size_t>(i)], bounds[static_cast<std::size_t>(i) + 1]};
  }
  std::vector<std::int64_t> counts() const;  // elements of each shard
};

// One unit for each layer group, one for the experts of each layer group, and one for the whole parameters at
// the end. Units may be empty. Shards are contiguous and as even as whole norm blocks allow: a bound is the
// start of a parameter, or a multiple of norm_block inside one, whichever is nearest to the even cut (the
// lower of two). So a bound is off by at most norm_block / 2 elements, a shard's size by at most norm_block,
// and a shard may be empty.
// shard_units() covers the trained parameters, frozen_units() the frozen ones.
std::vector<ShardUnit> shard_units(const FlatLayout& layout, const Shards& shards);
std::vector<ShardUnit> frozen_units(const FlatLayout& layout, const Shards& shards);

// From the number of units: the number of layer groups, and the units of one group (its cut parameters, its
// experts).
std::size_t num_groups_of(std::size_t num_units);
std::array<std::size_t, 2> units_of_group(std::size_t num_units, int group);

// The pieces of the flat order that one rank of the group holds, one for each unit of which it has a part.
std::vector<Range> shard_ranges(const std::vector<ShardUnit>& units, const Shards& index);

// The number of elements that one rank of the group holds.
std::int64_t shard_size(const std::vector<ShardUnit>& units, const Shards& index);

}  // namespace echelon
