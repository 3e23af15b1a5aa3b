// What a skewed popularity of experts does to devices, and what each way of balancing does about it, without
// training anything: routers, balance losses, biases and capacities are those of the trainer
// (spec/token_router, spec/routing_balance); the tokens are imagined.
//
// Token t wants expert e by log(E popularity_e) + a Gumbel variable of its own, so that without balancing
// expert e is the first choice of a share popularity_e of all tokens. What a router learns about that is one
// number an expert, which moves against the gradient of the balance losses: noise cannot be learned, and no
// other loss pulls back. So this is the best that a loss can do; `moved` says at which price.
//
// Expert e is on device e / (E / ep), token t on device t / (N / ep). Losses and capacities count over the
// tokens of a device, as the trainer's --balance-scope microbatch; biases look at all tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/progress.h"
#include "plan/routing_request.h"

namespace echelon {

// If experts took at most `factor` times their even share.
struct CapacityMeasure {
  double factor = 0;
  double dropped = 0;                        // of all choices
  double weight_dropped_by_probability = 0;  // of the weights of all choices
  double weight_dropped_by_position = 0;
  double slowest = 0;  // tokens of the device that has most, over the even load
};

struct RoutingReport {
  std::string method;
  // By step and expert: tokens that choose it, and those of them that are not dropped.
  std::vector<std::vector<double>> chosen, kept;
  // Means over the last tenth of the steps.
  std::vector<double> expert_tokens, device_tokens;  // what is not dropped
  double busiest_expert = 0, slowest_device = 0;     // of a step the largest, over the even load
  double dropped = 0, weight_dropped = 0;            // of all choices, and of their weights
  double moved = 0;                                  // choices that the token would not have made by itself
  double devices_per_token = 0, groups_per_token = 0;
  double copies_sent = 0, most_copies_received = 0;  // between devices, of one device: the mean, the largest
  std::vector<CapacityMeasure> capacities;
};

// Depends on the request and the method alone; all methods see the same tokens.
std::vector<RoutingReport> simulate_routing(const RoutingRequest& request,
                                            const std::vector<BalanceMethod>& methods,
                                            const Progress& progress = {});

}  // namespace echelon
