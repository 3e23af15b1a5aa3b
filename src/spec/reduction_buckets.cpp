#include "spec/reduction_buckets.h"

#include <algorithm>

#include "spec/shard_layout.h"

namespace echelon {

std::vector<GradientBucket> reduction_buckets(const Plan& plan,
                                              const std::vector<std::vector<ParamSpec>>& groups,
                                              int tp_rank) {
  const int tp = plan.mesh.size(Axis::tp);
  const FlatLayout layout = flat_layout(groups, tp, tp_rank);
  std::vector<GradientBucket> buckets;
  if (plan.zero_stage() == 0) {
    for (const Range& range : gradient_buckets(layout, default_bucket_bytes / element_bytes(plan.dtype)))
      buckets.push_back(gradient_bucket(groups, layout, range, tp, tp_rank));
    return buckets;
  }
  std::vector<ShardUnit> units = shard_units(layout, plan.shards());
  std::reverse(units.begin(), units.end() - 1);
  for (const ShardUnit& unit : units) {
    if (unit.range.size() == 0) continue;
    buckets.push_back(gradient_bucket(groups, layout, unit.range, tp, tp_rank));
    buckets.back().shards = unit.counts();
  }
  return buckets;
}

}  // namespace echelon
