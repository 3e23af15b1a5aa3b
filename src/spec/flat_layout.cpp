#include "spec/flat_layout.h"

namespace echelon {

std::int64_t local_numel(const ParamSpec& spec, int tp, int index) {
  std::int64_t count = 1;
  for (std::int64_t extent : local_shape(spec, tp, index)) count *= extent;
  return count;
}

FlatLayout flat_layout(const std::vector<std::vector<ParamSpec>>& groups, int tp, int index) {
  FlatLayout layout;
  for (const auto& group : groups)
    for (const ParamSpec& spec : group) layout.sizes.push_back(local_numel(spec, tp, index));
  layout.offsets.resize(layout.sizes.size());
  std::int64_t end = 0;
  // The parameters for which `here` holds, group by group; returns the range of each group.
  const auto place = [&](const auto& here) {
    std::vector<Range> ranges;
    std::size_t i = 0;
    for (const auto& group : groups) {
      const std::int64_t begin = end;
      for (const ParamSpec& spec : group) {
        if (here(spec)) {
          layout.offsets[i] = end;
          end += layout.sizes[i];
        }
        ++i;
      }
      ranges.push_back({begin, end});
    }
    return ranges;
  };
  const auto is_cut = [](const ParamSpec& spec) { return spec.expert < 0 && spec.shard_dim >= 0; };
  const auto is_whole = [](const ParamSpec& spec) { return spec.expert < 0 && spec.shard_dim < 0; };
  layout.cut_ranges = place([&](const ParamSpec& spec) { return !spec.frozen && is_cut(spec); });
  layout.expert_ranges = place([](const ParamSpec& spec) { return !spec.frozen && spec.expert >= 0; });
  layout.whole_range.begin = end;
  place([&](const ParamSpec& spec) { return !spec.frozen && is_whole(spec) && !spec.tp_partial; });
  layout.partial_range.begin = end;
  place([&](const ParamSpec& spec) { return !spec.frozen && is_whole(spec) && spec.tp_partial; });
  layout.whole_range.end = layout.partial_range.end = end;
  layout.frozen.cut_ranges = place([&](const ParamSpec& spec) { return spec.frozen && is_cut(spec); });
  layout.frozen.expert_ranges = place([](const ParamSpec& spec) { return spec.frozen && spec.expert >= 0; });
  layout.frozen.whole_range.begin = end;
  place([&](const ParamSpec& spec) { return spec.frozen && is_whole(spec); });
  layout.frozen.whole_range.end = end;
  return layout;
}

std::vector<BucketRange> gradient_buckets(const FlatLayout& layout, std::int64_t bucket_elements) {
  std::vector<BucketRange> buckets;
  if (layout.cut_ranges.empty()) return buckets;  // a stage without layers
  BucketRange cut{layout.cut_ranges.back(), false}, experts{layout.expert_ranges.back(), true};
  for (std::size_t g = layout.cut_ranges.size(); g-- > 0;) {
    cut.range.begin = layout.cut_ranges[g].begin;
    experts.range.begin = layout.expert_ranges[g].begin;
    for (BucketRange* open : {&cut, &experts})
      if (open->range.size() > 0 && (open->range.size() >= bucket_elements || g == 0)) {
        buckets.push_back(*open);
        open->range.end = open->range.begin;
      }
  }
  if (layout.whole_range.size() > 0) buckets.push_back({layout.whole_range});
  return buckets;
}

}  // namespace echelon
