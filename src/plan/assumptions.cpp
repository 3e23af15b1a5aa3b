#include "plan/assumptions.h"

#include "base/error.h"

namespace echelon {

const char* assumption_name(Assumption assumption) {
  switch (assumption) {
    case Assumption::even_expert_load:
      return "even_expert_load";
    case Assumption::no_step_taken_back:
      return "no_step_taken_back";
  }
  throw InvariantError("not an assumption");
}

// Under invariant numerics, if capacities drop copies and experts are not distributed, the ranks of a cp
// group gather the remaining copies of whole sequences.
static bool gathers_what_is_left(const Plan& plan) {
  return plan.numerics == Numerics::invariant && plan.model.experts != Experts::none &&
         plan.balancing.capacity > 0 && plan.mesh.ep == 1 && plan.mesh.size(Axis::cp) > 1;
}

// With a capacity, memory is reserved for all copies that it allows, whatever the routers do. Without one the
// load is certain only if every token goes to all experts.
std::vector<Assumption> memory_assumptions(const Plan& plan) {
  const bool certain =
      !gathers_what_is_left(plan) && (plan.mesh.ep == 1 || plan.balancing.capacity > 0 ||
                                      plan.model.experts_per_token == plan.model.num_experts);
  return certain ? std::vector<Assumption>() : std::vector{Assumption::even_expert_load};
}

// Even within a capacity, routers decide how many copies travel.
std::vector<Assumption> traffic_assumptions(const Plan& plan) {
  std::vector<Assumption> assumed = memory_assumptions(plan);
  if (assumed.empty() && plan.mesh.ep > 1 && plan.balancing.capacity > 0)
    assumed.push_back(Assumption::even_expert_load);
  if (!plan.optimizer_barrier) assumed.push_back(Assumption::no_step_taken_back);
  return assumed;
}

}  // namespace echelon
