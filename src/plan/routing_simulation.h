// Simulates, without training, what skewed popularity of experts does to devices, and what each balancing
// method changes. Routers, balance losses, biases and capacities are those of the trainer (spec/token_router,
// spec/routing_balance); the tokens are synthetic.
//
// Token t prefers expert e by the logit log(E popularity_e) + an independent Gumbel variable, so that without
// balancing expert e is the first choice of a fraction popularity_e of all tokens. What a router learns is
// one number per expert, which moves against the gradient of the balance losses: noise cannot be learned, and
// there is no other loss. So this is the best that a loss can achieve; `moved` says at what price.
//
// Expert e is on device e / (E / ep), token t on device t / (N / ep). Losses and capacities count over the
// tokens of a device, as with the trainer's --balance-scope microbatch; biases count all tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/progress.h"
#include "plan/routing_request.h"

namespace echelon {

// The effect if experts took at most `factor` times an even share.
struct CapacityMeasure {
  double factor = 0;
  double dropped = 0;                        // fraction of all choices
  double weight_dropped_by_probability = 0;  // fraction of the weights of all choices
  double weight_dropped_by_position = 0;
  double slowest = 0;  // tokens of the busiest device, over the even load
};

struct RoutingReport {
  std::string method;
  // By step and expert: how many tokens choose it, and how many of them are not dropped.
  std::vector<std::vector<double>> chosen, kept;
  // Means over the last tenth of the steps:
  std::vector<double> expert_tokens, device_tokens;  // not dropped
  double busiest_expert = 0, slowest_device = 0;     // the largest of a step, over the even load
  double dropped = 0, weight_dropped = 0;            // fractions of all choices, and of their weights
  double moved = 0;                                  // fraction of choices that differ from the token's own
  double devices_per_token = 0, groups_per_token = 0;
  double copies_sent = 0, most_copies_received = 0;  // between devices, for each device: mean, largest
  std::vector<CapacityMeasure> capacities;
};

// Depends only on the request and the method; all methods see the same tokens.
std::vector<RoutingReport> simulate_routing(const RoutingRequest& request,
                                            const std::vector<BalanceMethod>& methods,
                                            const Progress& progress = {});

}  // namespace echelon
