// Counts of routers' choices, and the balance factors and biases that follow from them. The trainer's routers
// and those that plan/routing_simulation simulates use this. Counts are integers stored in f64, so counts of
// several ranks can be added in any order.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "spec/routing.h"

namespace echelon {

// The counts of one scope: tokens sent to each expert, then tokens sent to each group (to at least one of its
// experts).
inline std::int64_t num_routing_counts(std::int64_t experts, const RouterSpec& spec) {
  return experts + spec.groups;
}

// Adds the choices ids (N, k) of all or some tokens of a scope to `counts`.
void count_routed(std::span<const std::int32_t> ids, std::int64_t k, std::int64_t experts,
                  const RouterSpec& spec, std::span<double> counts);

// Sets the E factors of RouterLosses from the counts of a whole scope and its number of tokens. If all
// experts are chosen equally often, each loss equals its coefficient, whatever E, k and the groups are.
//   f_e = E / (k T) tokens sent to e;               expert loss:         sum of f_e p_e
//   F_g = mean of f_e over the group;               device loss:         sum of F_g p_e
//   R_g = groups / (most groups T) tokens to g;     communication loss:  sum of R_g p_e
void add_balance_factors(const Balancing& balancing, const RouterSpec& spec, std::int64_t experts,
                         std::int64_t k, double tokens, std::span<const double> counts,
                         std::vector<double>& factors);

// Loss-free balancing (Wang et al. 2024; DeepSeek-V3, section 2.1.2): after a step each bias moves by `rate`,
// up if the expert had fewer tokens of the global batch than the mean, down if it had more.
void update_bias(std::span<const double> counts, double rate, std::span<double> bias);

// The biases (E) of each layer's router: training state, like weights. A layer that is absent has none. All
// ranks that hold a layer have the same.
using RouterBiases = std::map<std::int64_t, std::vector<double>>;

// Drops choices ids (N, k) of one scope so that each expert keeps at most `capacity`, chosen by `policy` from
// weights (N, k). `kept` (N, k) is ids with dropped choices replaced by -1. Returns how many were dropped.
std::int64_t drop_over_capacity(std::span<const std::int32_t> ids, std::span<const double> weights,
                                std::int64_t experts, std::int64_t capacity, DropPolicy policy,
                                std::span<std::int32_t> kept);

}  // namespace echelon
