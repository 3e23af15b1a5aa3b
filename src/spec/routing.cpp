#include "spec/routing.h"

#include <cmath>

#include "base/error.h"
#include "spec/plan.h"

namespace echelon {

const char* balance_scope_name(BalanceScope scope) {
  return scope == BalanceScope::sequence ? "sequence" : "microbatch";
}

const char* drop_policy_name(DropPolicy policy) {
  return policy == DropPolicy::probability ? "probability" : "position";
}

BalanceScope parse_balance_scope(const std::string& text, const std::string& field) {
  for (BalanceScope scope : {BalanceScope::sequence, BalanceScope::microbatch})
    if (text == balance_scope_name(scope)) return scope;
  refuse("{} {}: no such scope; legal: sequence, microbatch", field, text);
}

DropPolicy parse_drop_policy(const std::string& text, const std::string& field) {
  for (DropPolicy policy : {DropPolicy::probability, DropPolicy::position})
    if (text == drop_policy_name(policy)) return policy;
  refuse("{} {}: no such policy; legal: probability, position", field, text);
}

namespace {

void validate_numbers(const Plan& plan) {
  const Balancing& b = plan.balancing;
  constexpr double most = 1e6;
  for (const auto& [flag, value] : {std::pair{"--aux-loss", b.expert_loss},
                                    {"--device-loss", b.device_loss},
                                    {"--communication-loss", b.communication_loss},
                                    {"--z-loss", b.z_loss},
                                    {"--bias-rate", b.bias_rate},
                                    {"--capacity", b.capacity}}) {
    if (!(value >= 0 && value <= most)) refuse("{} {}: must be from 0 to {:.0f}", flag, value, most);
    if (value > 0 && plan.model.experts == Experts::none)
      refuse("{} {}: {} has no experts; legal: 0", flag, value, plan.model.name);
  }
  if (plan.model.router.groups == 1 && b.device_loss + b.communication_loss > 0)
    refuse(
        "--device-loss {}, --communication-loss {}: the experts of {} are one group, whose load is always "
        "even; "
        "legal: 0, or a model with router_groups of at least 2",
        b.device_loss, b.communication_loss, plan.model.name);
}

// A microbatch is a scope only where it is the same on one rank.
void validate_scope(const Plan& plan) {
  const Balancing& b = plan.balancing;
  if (b.scope != BalanceScope::microbatch || (!b.has_counts() && b.capacity == 0)) return;
  for (int dp = 1; dp < plan.mesh.size(Axis::dp); ++dp)
    if (dp_samples(plan, dp).begin % plan.micro_batch != 0)
      refuse(
          "--balance-scope microbatch: with --dp {} and --global-batch {} the microbatches of {} are others "
          "than on "
          "one rank; legal: a --micro-batch that divides what each rank has, or --balance-scope sequence",
          plan.mesh.size(Axis::dp), plan.global_batch, plan.micro_batch);
}

}  // namespace

void validate_experts(const Plan& plan) {
  const ModelSpec& m = plan.model;
  validate_numbers(plan);
  if (m.experts == Experts::none) return;
  const int tp = plan.mesh.size(Axis::tp), cp = plan.mesh.size(Axis::cp);
  if (m.expert_hidden < tp) refuse("--tp {}: {} has experts of only {}", tp, m.name, m.expert_hidden);
  if (plan.balancing.capacity > 0 && cp > 1)
    refuse(
        "--capacity {}: a sequence's tokens lie on {} ranks, and which of them an expert drops would have to "
        "be agreed "
        "on; with --cp {} legal: 0",
        plan.balancing.capacity, cp, cp);
  validate_scope(plan);
}

std::int64_t expert_capacity(double factor, std::int64_t tokens, std::int64_t k, std::int64_t experts) {
  const double even = static_cast<double>(tokens) * static_cast<double>(k) / static_cast<double>(experts);
  // A product that should be whole may lie a rounding above it.
  const double capacity = std::ceil(factor * even * (1 - 0x1p-50));
  return capacity >= static_cast<double>(tokens) ? tokens : static_cast<std::int64_t>(capacity);
}

std::int64_t room_for_copies(const Plan& plan, std::int64_t sequences) {
  const ModelSpec& m = plan.model;
  const std::int64_t k = m.experts_per_token, choices = sequences * plan.tokens_here() * k;
  if (plan.balancing.capacity == 0) return choices;
  const bool each = plan.balancing.scope == BalanceScope::sequence;
  const std::int64_t scopes = each ? sequences : 1, tokens = (each ? 1 : sequences) * plan.seq_len;
  const std::int64_t most =
      scopes * m.num_experts * expert_capacity(plan.balancing.capacity, tokens, k, m.num_experts);
  return most < choices ? most : choices;
}

}  // namespace echelon
