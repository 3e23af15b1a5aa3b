// What the tests of mixtures share: small models whose sizes divide by nothing, and ways to balance them.
#pragma once

#include "mesh_runs.h"
#include "tensor_checks.h"

namespace echelon::checks {

inline ModelSpec odd_mixtral(std::int64_t layers = 2) {
  ModelSpec m = odd_llama(false, 2, layers);
  m.name = "odd-mixtral";
  m.experts = Experts::mixtral;
  m.num_experts = 5;
  m.experts_per_token = 2;
  m.expert_hidden = m.mlp_hidden = 13;
  return m;
}

inline ModelSpec odd_deepseek(std::int64_t layers = 3) {
  ModelSpec m = odd_llama(false, 4, layers);
  m.name = "odd-deepseek";
  m.experts = Experts::deepseek;
  m.num_experts = 6;
  m.experts_per_token = 4;
  m.expert_hidden = 7;
  m.num_shared_experts = 1;
  m.num_dense_layers = 1;
  m.router = {.scores = RouterScores::sigmoid, .scale = 1.5, .groups = 3, .most_groups = 2};
  return m;
}

// One whose experts divide over ep 2 and 4. With k = num_experts every expert has the same load.
inline ModelSpec even_mixtral(std::int64_t k, std::int64_t layers = 2) {
  ModelSpec m = odd_mixtral(layers);
  m.name = "even-mixtral";
  m.num_experts = 8;
  m.experts_per_token = k;
  return m;
}
inline ModelSpec even_deepseek(std::int64_t k, std::int64_t layers = 3) {
  ModelSpec m = odd_deepseek(layers);
  m.name = "even-deepseek";
  m.num_experts = 8;
  m.experts_per_token = k;
  m.router.groups = 4;
  return m;
}

inline Balancing all_losses(bool groups = true) {
  Balancing b{.expert_loss = 0.3, .z_loss = 0.02};
  if (groups) b.device_loss = 0.2, b.communication_loss = 0.1;
  return b;
}

inline std::vector<Balancing> balancings(const ModelSpec& model) {
  std::vector<Balancing> list{{}, all_losses(model.router.groups > 1), {}, {}};
  list[2] = list[1];
  list[2].capacity = 0.8;
  list[2].drop = DropPolicy::position;
  list[3] = list[1];
  list[3].capacity = 1.1;
  list[3].scope = BalanceScope::microbatch;
  return list;
}

inline std::string describe_experts(const Plan& plan) {
  const Balancing& b = plan.balancing;
  return fmt::format(
      "{}, ep {} k {} pp {} {} cp {} zero {} recompute {}, losses {} scope {} capacity {} by {}",
      describe(plan), plan.mesh.ep, plan.model.experts_per_token, plan.mesh.size(Axis::pp), plan.schedule,
      plan.mesh.size(Axis::cp), plan.zero, recompute_name(plan.recompute), b.has_losses(), name_of(b.scope),
      b.capacity, name_of(b.drop));
}

}  // namespace echelon::checks
