#include "plan/price.h"

#include "base/error.h"
#include "plan/explain.h"
#include "plan/search.h"

namespace echelon {
Estimate price(const Plan& plan, const Machine& machine, const ExactMemory& exact_memory) {
  if (const auto refusal = unpriced(plan)) throw PlanRefusal(plan, *refusal);
  SearchRequest request;
  request.work = {plan.model,     plan.seq_len, plan.global_batch,
                  Precision::f32, machine,      load_software("echelon"),
                  exact_memory};
  request.gpus = plan.mesh.num_ranks();
  request.pins = pins_of(plan);
  request.top = 1;
  SearchResult result = search(request);
  if (result.plans.empty()) refuse("--machine {}: {}", machine.name, explain_nothing(result, request.gpus));
  return std::move(result.plans.front());
}

}  // namespace echelon
