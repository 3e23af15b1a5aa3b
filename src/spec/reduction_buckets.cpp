#include "spec/reduction_buckets.h"

#include "spec/shard_layout.h"

namespace echelon {

std::vector<GradientBucket> reduction_buckets(const Plan& plan,
                                              const std::vector<std::vector<ParamSpec>>& groups,
                                              int tp_rank) {
  const int tp = plan.mesh.size(Axis::tp);
  const FlatLayout layout = flat_layout(groups, tp, tp_rank);
  std::vector<GradientBucket> buckets;
  if (plan.zero_stage() == 0) {
    for (const auto& [range, experts] :
         gradient_buckets(layout, plan.bucket_bytes / element_bytes(plan.precision.gradients))) {
      buckets.push_back(gradient_bucket(groups, layout, range, tp, tp_rank));
      buckets.back().experts = experts;
    }
    return buckets;
  }
  const std::vector<ShardUnit> units = shard_units(layout, plan.all_shards());
  const auto add = [&](const ShardUnit& unit) {
    if (unit.range.size() == 0) return;
    buckets.push_back(gradient_bucket(groups, layout, unit.range, tp, tp_rank));
    buckets.back().experts = unit.experts;
    buckets.back().shards = unit.counts();
  };
  for (int group = static_cast<int>(groups.size()); group-- > 0;)
    for (std::size_t unit : units_of_group(units.size(), group)) add(units[unit]);
  add(units.back());
  return buckets;
}

}  // namespace echelon
