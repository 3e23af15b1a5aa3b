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
  const auto place = [&](bool cut) {
    std::size_t i = 0;
    for (const auto& group : groups) {
      const std::int64_t begin = end;
      for (const ParamSpec& spec : group) {
        if ((spec.shard_dim >= 0) == cut) {
          layout.offsets[i] = end;
          end += layout.sizes[i];
        }
        ++i;
      }
      if (cut) layout.cut_ranges.push_back({begin, end});
    }
  };
  place(true);
  layout.whole_range.begin = end;
  place(false);
  layout.whole_range.end = end;
  return layout;
}

std::vector<Range> gradient_buckets(const FlatLayout& layout, std::int64_t bucket_elements) {
  std::vector<Range> buckets;
  Range open{layout.whole_range.begin, layout.whole_range.begin};
  for (std::size_t g = layout.cut_ranges.size(); g-- > 0;) {
    open.begin = layout.cut_ranges[g].begin;
    if (open.size() >= bucket_elements || g == 0) {
      if (open.size() > 0) buckets.push_back(open);
      open.end = open.begin;
    }
  }
  if (layout.whole_range.size() > 0) buckets.push_back(layout.whole_range);
  return buckets;
}

}  // namespace echelon
