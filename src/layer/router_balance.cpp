#include "layer/router_balance.h"

#include <numeric>

#include "base/error.h"
#include "tensor/reference_view.h"

namespace echelon {

void count_routed(const Tensor& ids, std::int64_t experts, const RouterSpec& spec, std::span<double> counts) {
  check(std::ssize(counts) == num_routing_counts(experts, spec), "routing counts have one size");
  const std::int64_t tokens = ids.rows(), k = ids.cols(), group_size = experts / spec.groups;
  const std::int32_t* id = flat<std::int32_t>(ids, tokens * k);
  std::vector<std::int64_t> last(static_cast<std::size_t>(spec.groups), -1);  // token that was counted there
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t j = 0; j < k; ++j, ++id) {
      counts[static_cast<std::size_t>(*id)] += 1;
      const auto group = static_cast<std::size_t>(*id / group_size);
      if (last[group] != t) counts[static_cast<std::size_t>(experts) + group] += 1;
      last[group] = t;
    }
}

void add_balance_factors(const Balancing& balancing, const RouterSpec& spec, std::int64_t experts,
                         std::int64_t k, double tokens, std::span<const double> counts,
                         std::vector<double>& factors) {
  const std::int64_t size = experts / spec.groups;
  const double even = tokens * static_cast<double>(k) / static_cast<double>(experts);
  const double even_group = tokens * static_cast<double>(spec.most_groups) / static_cast<double>(spec.groups);
  for (std::int64_t g = 0; g < spec.groups; ++g) {
    const std::span<const double> of_group =
        counts.subspan(static_cast<std::size_t>(g * size), static_cast<std::size_t>(size));
    const double mean =
        std::accumulate(of_group.begin(), of_group.end(), 0.0) / (static_cast<double>(size) * even);
    const double reached = counts[static_cast<std::size_t>(experts + g)] / even_group;
    for (const double count : of_group)
      factors.push_back(tokens == 0 ? 0
                                    : balancing.expert_loss * count / even + balancing.device_loss * mean +
                                          balancing.communication_loss * reached);
  }
}

void update_bias(std::span<const double> counts, double rate, std::span<double> bias) {
  double total = 0;
  for (std::size_t e = 0; e < bias.size(); ++e) total += counts[e];
  const double mean = total / static_cast<double>(bias.size());
  for (std::size_t e = 0; e < bias.size(); ++e)
    bias[e] += counts[e] < mean ? rate : counts[e] > mean ? -rate : 0;
}

}  // namespace echelon
