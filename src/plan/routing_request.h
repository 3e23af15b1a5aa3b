// The input of a simulation of routing: experts, tokens, how skewed their preferences are, and balancing
// methods.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/routing.h"

namespace echelon {

struct RoutingRequest {
  std::int64_t experts = 8, experts_per_token = 2;
  RouterSpec router;                        // its most_groups is for methods with a node limit
  int ep = 1;                               // devices
  std::int64_t tokens = 2048, steps = 100;  // tokens of a step, over all devices
  std::uint64_t seed = 1;
  std::vector<double> popularity;  // of each expert, above 0
  Balancing balancing;             // numbers for the methods: see parse_balance_method()
  double router_lr = 10;           // how far a step moves logits against the gradient of the losses
  std::vector<double> capacities;  // capacity factors for which drops are counted, for every method
};

std::vector<double> zipf_popularity(std::int64_t experts, double exponent);
std::vector<double> one_popular_expert(std::int64_t experts, std::int64_t expert, double share);

struct BalanceMethod {
  std::string name;
  Balancing balancing;
  bool node_limit = false;
};
// "none", or some of aux-loss, device-loss, communication-loss, bias, capacity, node-limit joined by +, each
// with its number from `balancing`. RequestError naming `field`.
BalanceMethod parse_balance_method(const std::string& text, const std::string& field,
                                   const Balancing& balancing);
// The single methods that can act on the request.
std::vector<std::string> balance_methods(const RoutingRequest& request);

// RequestError naming the flag.
void validate(const RoutingRequest& request);

}  // namespace echelon
