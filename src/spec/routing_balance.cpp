#include "spec/routing_balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace echelon {

void count_routed(std::span<const std::int32_t> ids, std::int64_t k, std::int64_t experts,
                  const RouterSpec& spec, std::span<double> counts) {
  check(std::ssize(counts) == num_routing_counts(experts, spec), "routing counts have one size");
  const std::int64_t tokens = std::ssize(ids) / k, group_size = experts / spec.groups;
  std::vector<std::int64_t> last(static_cast<std::size_t>(spec.groups), -1);  // token that was counted there
  const std::int32_t* id = ids.data();
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

std::int64_t drop_over_capacity(std::span<const std::int32_t> ids, std::span<const double> weights,
                                std::int64_t experts, std::int64_t capacity, DropPolicy policy,
                                std::span<std::int32_t> kept) {
  check(ids.size() == weights.size() && ids.size() == kept.size(), "every choice has a weight and a place");
  std::copy(ids.begin(), ids.end(), kept.begin());
  // A token chooses an expert once at most, so choices in their order are tokens in theirs.
  std::vector<std::vector<std::size_t>> queues(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < ids.size(); ++i) queues[static_cast<std::size_t>(ids[i])].push_back(i);
  std::int64_t dropped = 0;
  for (auto& queue : queues) {
    if (std::ssize(queue) <= capacity) continue;
    if (policy == DropPolicy::probability)  // what is no number comes last, so that there is an order
      std::stable_sort(queue.begin(), queue.end(), [&](std::size_t a, std::size_t b) {
        return std::isnan(weights[b]) ? !std::isnan(weights[a]) : weights[a] > weights[b];
      });
    for (auto i = queue.begin() + capacity; i != queue.end(); ++i, ++dropped) kept[*i] = -1;
  }
  return dropped;
}

}  // namespace echelon
