// The output of simulate --moe for the balancing methods.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/simulate_experts_flags.h"
#include "draw/heat_map.h"
#include "plan/routing_simulation.h"

namespace echelon {

nlohmann::ordered_json to_json(const ExpertsFlags::Request& request,
                               const std::vector<RoutingReport>& reports);
// The request, the result of each method, and what capacities would drop.
std::string describe(const ExpertsFlags::Request& request, const std::vector<RoutingReport>& reports);
// One for each method, of experts or devices, over the steps.
std::vector<HeatMap> heat_maps(const ExpertsFlags::Request& request,
                               const std::vector<RoutingReport>& reports);
// method,step,expert,device,chosen,kept
std::string to_csv(const ExpertsFlags::Request& request, const std::vector<RoutingReport>& reports);

}  // namespace echelon
