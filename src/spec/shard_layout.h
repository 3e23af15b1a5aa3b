// How ZeRO cuts what a rank holds of parameters, gradients and optimizer state over a group of data-parallel
// ranks. Read by the trainer's parameter store and by the memory and traffic predictions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "spec/flat_layout.h"

namespace echelon {

// Numbers of ranks that state is cut over, or a rank's index among them: of what all ranks of dp x cp hold
// alike, and of routed experts.
struct Shards {
  int all = 0, experts = 0;
};

// A piece of the flat order that is gathered, reduced and let go of as one: the cut parameters of a layer
// group, its routed experts, or all whole parameters.
struct ShardUnit {
  Range range;
  bool experts = false;
  std::vector<std::int64_t>
      bounds;  // shard i is [bounds[i], bounds[i + 1]); the first and last are the range's

  int of(const Shards& s) const { return experts ? s.experts : s.all; }
  Range shard(const Shards& index) const { return shard(of(index)); }
  Range shard(int i) const {
    return {bounds[static_cast<std::size_t>(i)], bounds[static_cast<std::size_t>(i) + 1]};
  }
  std::vector<std::int64_t> counts() const;  // elements of each shard
};

// One unit for each layer group, one for the experts of each layer group, and one for the whole parameters at
// the end; units may be empty. Shards are contiguous and as even as whole norm blocks allow: each bound is
// the parameter start or multiple of norm_block inside a parameter that is nearest to the even cut, the lower
// one of two. So a bound is off by at most norm_block / 2 elements, a shard's size by at most norm_block, and
// a shard may be empty.
// Of what is trained; frozen_units() are the same of what is frozen.
std::vector<ShardUnit> shard_units(const FlatLayout& layout, const Shards& shards);
std::vector<ShardUnit> frozen_units(const FlatLayout& layout, const Shards& shards);

// From so many of these units: the layer groups, and which units are those of one: its cut parameters, its
// experts.
std::size_t num_groups_of(std::size_t num_units);
std::array<std::size_t, 2> units_of_group(std::size_t num_units, int group);

// The pieces of the flat order that one rank of the group holds, one for each unit that it has a part of.
std::vector<Range> shard_ranges(const std::vector<ShardUnit>& units, const Shards& index);

// Elements of all units that one rank of the group holds.
std::int64_t shard_size(const std::vector<ShardUnit>& units, const Shards& index);

}  // namespace echelon
