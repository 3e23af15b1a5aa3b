#include "plan/routing_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace echelon {
namespace {

struct MethodPart {
  const char* name;
  double Balancing::*number;  // nullptr: the node limit
};
constexpr MethodPart method_parts[] = {{"aux-loss", &Balancing::expert_loss},
                                       {"device-loss", &Balancing::device_loss},
                                       {"communication-loss", &Balancing::communication_loss},
                                       {"bias", &Balancing::bias_rate},
                                       {"capacity", &Balancing::capacity},
                                       {"node-limit", nullptr}};

}  // namespace

std::vector<double> zipf_popularity(std::int64_t experts, double exponent) {
  std::vector<double> popularity;
  for (std::int64_t e = 1; e <= experts; ++e)
    popularity.push_back(std::pow(static_cast<double>(e), -exponent));
  return popularity;
}

std::vector<double> one_popular_expert(std::int64_t experts, std::int64_t expert, double share) {
  std::vector<double> popularity(static_cast<std::size_t>(experts),
                                 (1 - share) / static_cast<double>(experts - 1));
  popularity[static_cast<std::size_t>(expert)] = share;
  return popularity;
}

BalanceMethod parse_balance_method(const std::string& text, const std::string& field,
                                   const Balancing& balancing) {
  BalanceMethod method{text, {}, false};
  if (text == "none") return method;
  method.balancing.drop = balancing.drop;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('+', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const auto* const found = std::find_if(std::begin(method_parts), std::end(method_parts),
                                           [&](const MethodPart& p) { return part == p.name; });
    if (found == std::end(method_parts))
      refuse(
          "{} {}: no such way of balancing; legal: none, or some of aux-loss, device-loss, "
          "communication-loss, bias, capacity, node-limit with + between them",
          field, text);
    if (found->number == nullptr)
      method.node_limit = true;
    else
      method.balancing.*(found->number) = balancing.*(found->number);
    begin = end + 1;
  }
  return method;
}

std::vector<std::string> balance_methods(const RoutingRequest& request) {
  std::vector<std::string> names{"none"};
  for (const MethodPart& part : method_parts) {
    const bool of_groups = part.number == &Balancing::device_loss ||
                           part.number == &Balancing::communication_loss || part.number == nullptr;
    if (of_groups && request.router.groups == 1) continue;
    if (part.number == nullptr
            ? request.router.most_groups < std::min(request.router.groups, request.experts_per_token)
            : request.balancing.*(part.number) > 0)
      names.emplace_back(part.name);
  }
  return names;
}

void validate(const RoutingRequest& r) {
  constexpr std::int64_t most_numbers = 1 << 26;  // logits of a step: half a gigabyte
  constexpr std::int64_t most_experts = 4096;
  if (r.experts < 2 || r.experts > most_experts)
    refuse("--experts {}: must be from 2 to {}", r.experts, most_experts);
  if (r.experts_per_token < 1 || r.experts_per_token > r.experts)
    refuse("--top-k {}: must be from 1 to the {} experts", r.experts_per_token, r.experts);
  if (r.ep < 1 || r.experts % r.ep != 0) refuse("--ep {}: must divide the {} experts", r.ep, r.experts);
  if (r.tokens < 1 || r.tokens % r.ep != 0)
    refuse("--tokens {}: must be a multiple of --ep {} above 0, of which each device has a part", r.tokens,
           r.ep);
  if (r.tokens > most_numbers / r.experts)
    refuse("--tokens {}: with {} experts legal: up to {}", r.tokens, r.experts, most_numbers / r.experts);
  if (r.steps < 1 || r.steps > 100000) refuse("--steps {}: must be from 1 to 100000", r.steps);
  if (r.router.groups < 1 || r.experts % r.router.groups != 0)
    refuse("--groups {}: must divide the {} experts", r.router.groups, r.experts);
  const std::int64_t size = r.experts / r.router.groups, least = (r.experts_per_token + size - 1) / size;
  if (r.router.most_groups < least || r.router.most_groups > r.router.groups)
    refuse("--most-groups {}: {} experts of a token in groups of {}; legal: {} to {}", r.router.most_groups,
           r.experts_per_token, size, least, r.router.groups);
  if (!(r.router_lr >= 0 && r.router_lr <= 1e6)) refuse("--router-lr {}: must be from 0 to 1e6", r.router_lr);
  for (const auto& [flag, value] : {std::pair{"--aux-loss", r.balancing.expert_loss},
                                    {"--device-loss", r.balancing.device_loss},
                                    {"--communication-loss", r.balancing.communication_loss},
                                    {"--bias-rate", r.balancing.bias_rate},
                                    {"--capacity", r.balancing.capacity}})
    if (!(value >= 0 && value <= 1e6)) refuse("{} {}: must be from 0 to 1e6", flag, value);
  for (double factor : r.capacities)
    if (!(factor > 0 && factor <= 1e6))
      refuse("--capacities {}: {} must be above 0 and at most 1e6", fmt::join(r.capacities, ","), factor);
  check(std::ssize(r.popularity) == r.experts, "every expert has a popularity");
  for (double p : r.popularity) check(p > 0 && std::isfinite(p), "popularities are above 0");
}

}  // namespace echelon
