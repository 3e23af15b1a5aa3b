#include "spec/routing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/units.h"
#include "spec/plan_refusal.h"

namespace echelon {

const char* balance_scope_name(BalanceScope scope) {
  return scope == BalanceScope::sequence     ? "sequence"
         : scope == BalanceScope::microbatch ? "microbatch"
                                             : "batch";
}

const char* drop_policy_name(DropPolicy policy) {
  return policy == DropPolicy::probability ? "probability" : "position";
}

BalanceScope parse_balance_scope(const std::string& text, const std::string& field) {
  for (BalanceScope scope : {BalanceScope::sequence, BalanceScope::microbatch, BalanceScope::batch})
    if (text == balance_scope_name(scope)) return scope;
  refuse("{} {}: no such scope; legal: sequence, microbatch, batch", field, text);
}

DropPolicy parse_drop_policy(const std::string& text, const std::string& field) {
  for (DropPolicy policy : {DropPolicy::probability, DropPolicy::position})
    if (text == drop_policy_name(policy)) return policy;
  refuse("{} {}: no such policy; legal: probability, position", field, text);
}

namespace {

void validate_numbers(const Plan& plan) {
  constexpr double most = 1e6;
  for (const auto& [name, member] : {std::pair{"--aux-loss", &Balancing::expert_loss},
                                     {"--device-loss", &Balancing::device_loss},
                                     {"--communication-loss", &Balancing::communication_loss},
                                     {"--z-loss", &Balancing::z_loss},
                                     {"--bias-rate", &Balancing::bias_rate},
                                     {"--capacity", &Balancing::capacity}}) {
    const std::string flag = name;
    const double value = plan.balancing.*member;
    const Remedy none{flag, "0", [m = member](Plan& other) { other.balancing.*m = 0; }};
    if (!(value >= 0 && value <= most)) refuse("{} {}: must be from 0 to {:.0f}", flag, value, most);
    if (value > 0 && plan.model.experts == Experts::none)
      throw PlanRefusal(flag, fmt::format("{} {}: {} has no experts", flag, value, plan.model.name), {none});
    if (value > 0 && plan.model.router.groups == 1 &&
        (member == &Balancing::device_loss || member == &Balancing::communication_loss))
      throw PlanRefusal(
          flag,
          fmt::format("{} {}: the experts of {} are one group, whose load is always even; a model "
                      "with router_groups of at least 2 has several",
                      flag, value, plan.model.name),
          {none});
  }
}

Remedy scope_remedy(BalanceScope scope) {
  return {"--balance-scope", balance_scope_name(scope), [=](Plan& plan) { plan.balancing.scope = scope; }};
}

// Whether every data-parallel rank's microbatches of so many are those of one rank.
bool has_whole_microbatches(const Plan& plan, std::int64_t micro_batch) {
  for (int dp = 1; dp < plan.mesh.size(Axis::dp); ++dp)
    if (dp_samples(plan, dp).begin % micro_batch != 0) return false;
  return true;
}

// A microbatch is a scope only where it is the same on one rank.
void validate_scope(const Plan& plan) {
  const Balancing& b = plan.balancing;
  if (b.scope == BalanceScope::batch && b.capacity > 0)
    throw PlanRefusal(
        "--balance-scope",
        fmt::format(
            "--balance-scope batch: with --capacity {} all ranks would have to agree which tokens of the "
            "batch an expert drops",
            b.capacity),
        {scope_remedy(BalanceScope::sequence),
         scope_remedy(BalanceScope::microbatch),
         {"--capacity", "0", [](Plan& other) { other.balancing.capacity = 0; }}});
  if (b.scope != BalanceScope::microbatch || (!b.has_counts() && b.capacity == 0)) return;
  if (has_whole_microbatches(plan, plan.micro_batch)) return;
  std::int64_t fits = plan.micro_batch;
  while (!has_whole_microbatches(plan, fits)) --fits;
  throw PlanRefusal(
      "--balance-scope",
      fmt::format("--balance-scope microbatch: with --dp {} and --global-batch {} the microbatches of {} are "
                  "others than on one rank",
                  plan.mesh.size(Axis::dp), plan.global_batch, plan.micro_batch),
      {scope_remedy(BalanceScope::sequence), remedy("--micro-batch", &Plan::micro_batch, fits)});
}

// Equal runs of experts for each rank of a group, and equal groups for each block that ZeRO cuts state over.
void validate_expert_groups(const Plan& plan) {
  const int ep = plan.mesh.ep, ranks = plan.mesh.dp_cp_size();
  if (ep == 1) return;
  const ModelSpec& m = plan.model;
  const auto spread_over = [](int n) {
    return Remedy{"--ep", fmt::format("{}", n), [=](Plan& other) { other.mesh.ep = n; }};
  };
  if (m.experts == Experts::none)
    throw PlanRefusal("--ep", fmt::format("--ep {}: {} has no experts", ep, m.name), {spread_over(1)});
  const int block = plan.zero > 0 ? plan.shards() : ranks;
  if (m.num_experts % ep != 0 || block % ep != 0) {
    std::vector<Remedy> legal;
    for (int n = 1; n <= block && n <= m.num_experts; ++n)
      if (m.num_experts % n == 0 && block % n == 0) legal.push_back(spread_over(n));
    throw PlanRefusal("--ep",
                      fmt::format("--ep {}: {} on {} (--dp {} x --cp {}{}) do not divide into so "
                                  "many",
                                  ep, counted(m.num_experts, "expert"), counted(block, "data-parallel rank"),
                                  plan.mesh.size(Axis::dp), plan.mesh.size(Axis::cp),
                                  plan.hsdp > 1 ? fmt::format(" / --hsdp {}", plan.hsdp) : ""),
                      legal);
  }
  if (plan.compression.kind != CompressionKind::none)
    throw PlanRefusal("--compress",
                      fmt::format("--compress {}: is not built for experts on several ranks, and --ep is {}",
                                  compression_text(plan.compression), ep),
                      {{"--compress", "none", [](Plan& other) { other.compression = {}; }}, spread_over(1)});
}

}  // namespace

void validate_experts(const Plan& plan) {
  const ModelSpec& m = plan.model;
  const int tp = plan.mesh.size(Axis::tp), etp = plan.mesh.etp;
  if (etp != 0 && (etp != tp || m.experts == Experts::none))
    refuse("--etp {}: {}", etp,
           m.experts == Experts::none ? m.name + " has no experts; leave it out"
                                      : fmt::format("experts are cut over --tp {} here, as MLPs are", tp));
  validate_expert_groups(plan);
  validate_numbers(plan);
  if (m.experts == Experts::none) return;
  validate_scope(plan);
}

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
