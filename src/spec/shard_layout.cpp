#include "spec/shard_layout.h"

#include <algorithm>
#include <map>

namespace echelon {
namespace {

using Parameters = std::map<std::int64_t, std::int64_t>;  // size by offset, empty ones left out

// The place nearest to `wanted` where a norm block begins or ends.
std::int64_t nearest_bound(const Parameters& parameters, std::int64_t wanted) {
  const auto after = parameters.upper_bound(wanted);
  if (after == parameters.begin()) return wanted;
  const auto& [offset, size] = *std::prev(after);
  const std::int64_t lower = offset + (wanted - offset) / norm_block * norm_block;
  const std::int64_t upper = std::min(lower + norm_block, offset + size);
  return wanted - lower <= upper - wanted ? lower : upper;
}

}  // namespace

std::vector<std::int64_t> ShardUnit::counts() const {
  std::vector<std::int64_t> counts;
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) counts.push_back(bounds[i + 1] - bounds[i]);
  return counts;
}

static std::vector<ShardUnit> units_of(const FlatLayout& layout, const std::vector<Range>& cut,
                                       const std::vector<Range>& experts, const Range& whole,
                                       const Shards& shards) {
  Parameters parameters;
  for (std::size_t i = 0; i < layout.offsets.size(); ++i)
    if (layout.sizes[i] > 0) parameters[layout.offsets[i]] = layout.sizes[i];
  std::vector<ShardUnit> units;
  const auto add = [&](const Range& range, bool of_experts) {
    ShardUnit unit{range, of_experts, {range.begin}};
    const int number = unit.of(shards);
    for (int i = 1; i < number; ++i)
      unit.bounds.push_back(
          range.size() == 0
              ? range.begin
              : nearest_bound(parameters, range.begin + split_range(range.size(), number, i).begin));
    unit.bounds.push_back(range.end);
    units.push_back(std::move(unit));
  };
  for (const Range& range : cut) add(range, false);
  for (const Range& range : experts) add(range, true);
  add(whole, false);
  return units;
}

std::vector<ShardUnit> shard_units(const FlatLayout& layout, const Shards& shards) {
  return units_of(layout, layout.cut_ranges, layout.expert_ranges, layout.whole_range, shards);
}

std::vector<ShardUnit> frozen_units(const FlatLayout& layout, const Shards& shards) {
  const FlatLayout::Frozen& frozen = layout.frozen;
  return units_of(layout, frozen.cut_ranges, frozen.expert_ranges, frozen.whole_range, shards);
}

std::size_t num_groups_of(std::size_t num_units) { return (num_units - 1) / 2; }

std::array<std::size_t, 2> units_of_group(std::size_t num_units, int group) {
  const auto g = static_cast<std::size_t>(group);
  return {g, num_groups_of(num_units) + g};
}

std::vector<Range> shard_ranges(const std::vector<ShardUnit>& units, const Shards& index) {
  std::vector<Range> ranges;
  for (const ShardUnit& unit : units) {
    const Range shard = unit.shard(index);
    if (shard.size() > 0) ranges.push_back(shard);
  }
  return ranges;
}

std::int64_t shard_size(const std::vector<ShardUnit>& units, const Shards& index) {
  std::int64_t size = 0;
  for (const ShardUnit& unit : units) size += unit.shard(index).size();
  return size;
}

}  // namespace echelon
