#include "spec/routing.h"

#include <algorithm>
#include <cmath>

#include "spec/plan.h"

namespace echelon {

std::int64_t expert_capacity(double factor, std::int64_t tokens, std::int64_t k, std::int64_t experts) {
  const double even = static_cast<double>(tokens) * static_cast<double>(k) / static_cast<double>(experts);
  // A product that should be whole may lie a rounding above it.
  const double capacity = std::ceil(factor * even * (1 - 0x1p-50));
  return capacity >= static_cast<double>(tokens) ? tokens : static_cast<std::int64_t>(capacity);
}

// In a microbatch, over its scopes.
static std::int64_t kept_by_expert(const Plan& plan, std::int64_t sequences) {
  const bool each = plan.balancing.scope == BalanceScope::sequence;
  const std::int64_t scopes = each ? sequences : 1, tokens = (each ? 1 : sequences) * plan.seq_len;
  return scopes * expert_capacity(plan.balancing.capacity, tokens, plan.model.experts_per_token,
                                  plan.model.num_experts);
}

std::int64_t room_for_copies(const Plan& plan, std::int64_t sequences) {
  const ModelSpec& m = plan.model;
  const std::int64_t choices = sequences * plan.tokens_here() * m.experts_per_token;
  if (plan.balancing.capacity == 0) return choices;
  return std::min(choices, m.num_experts * kept_by_expert(plan, sequences));
}

Range experts_of(const Plan& plan, int ep_index) {
  return split_range(plan.model.num_experts, plan.mesh.ep, ep_index);
}

std::int64_t room_for_received(const Plan& plan, std::int64_t sequences) {
  const int ep = plan.mesh.ep;
  if (ep == 1 || plan.balancing.capacity == 0) return room_for_copies(plan, sequences);
  const ModelSpec& m = plan.model;
  const std::int64_t most = std::min(plan.micro_batch, dp_samples(plan, 0).size()), here = m.num_experts / ep,
                     choices = most * plan.tokens_here() * std::min(m.experts_per_token, here);
  // Neighbours share the sequences of their cp group, and the capacities of those.
  const int cp = plan.mesh.size(Axis::cp), groups = ep % cp == 0 ? ep / cp : cp % ep == 0 ? 1 : ep / cp + 2;
  return std::min(ep * choices, groups * here * kept_by_expert(plan, most));
}

}  // namespace echelon
