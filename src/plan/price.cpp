#include "plan/price.h"

#include "base/error.h"
#include "plan/explain.h"
#include "plan/search.h"

namespace echelon {
Estimate price(const Plan& plan, const Machine& machine, const ExactMemory& exact_memory) {
  SearchRequest request;
  request.work = {{}, Precision::f32, machine, load_software("echelon"), exact_memory};
  if (const auto refusal = unpriced(plan, request.work)) throw PlanRefusal(plan, *refusal);
  request.pin_all(plan);
  request.gpus = plan.mesh.num_ranks();
  request.top = 1;
  SearchResult result = search(request);
  if (result.plans.empty()) refuse("--machine {}: {}", machine.name, explain_nothing(result, request.gpus));
  return std::move(result.plans.front());
}

}  // namespace echelon
