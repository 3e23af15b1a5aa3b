// Counts of what routers chose, and the factors and biases that balancing makes of them: of the trainer's
// routers and of those that plan/routing_simulation imagines. Counts are whole numbers in f64: those of
// several ranks add up to the counts of their tokens together, in any order.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "spec/routing.h"

namespace echelon {

// What is counted of one scope: tokens sent to each expert, then tokens sent to each group, at least one
// expert of it.
inline std::int64_t num_routing_counts(std::int64_t experts, const RouterSpec& spec) {
  return experts + spec.groups;
}

// Adds the choices ids (N, k) of one scope's tokens, or of some of them, to `counts`.
void count_routed(std::span<const std::int32_t> ids, std::int64_t k, std::int64_t experts,
                  const RouterSpec& spec, std::span<double> counts);

// From the whole scope's counts, with its number of tokens: the E factors of RouterLosses. With every expert
// chosen as often as any other each loss is its coefficient, whatever E, k and the groups.
//   f_e = E / (k T) tokens sent to e;               expert loss:         sum of f_e p_e
//   F_g = mean of f_e over the group;               device loss:         sum of F_g p_e
//   R_g = groups / (most groups T) tokens to g;     communication loss:  sum of R_g p_e
void add_balance_factors(const Balancing& balancing, const RouterSpec& spec, std::int64_t experts,
                         std::int64_t k, double tokens, std::span<const double> counts,
                         std::vector<double>& factors);

// Loss-free balancing (Wang et al. 2024; DeepSeek-V3, section 2.1.2): after a step each bias moves by `rate`,
// up where the expert had fewer tokens of the whole batch than the mean, down where it had more.
void update_bias(std::span<const double> counts, double rate, std::span<double> bias);

// What it has made of the routers, by layer: state, as weights are. (E) each; a layer that is not there has
// none. All ranks that hold a layer have the same.
using RouterBiases = std::map<std::int64_t, std::vector<double>>;

// Choices ids (N, k) of one scope that stay keep their place in `kept` (N, k); the others are -1
// there. Each expert keeps at most `capacity`, by the policy; weights (N, k). Returns how many were dropped.
std::int64_t drop_over_capacity(std::span<const std::int32_t> ids, std::span<const double> weights,
                                std::int64_t experts, std::int64_t capacity, DropPolicy policy,
                                std::span<std::int32_t> kept);

}  // namespace echelon
