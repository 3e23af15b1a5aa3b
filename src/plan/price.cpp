#include "plan/price.h"

#include "base/error.h"
#include "plan/explain.h"
#include "plan/search.h"

namespace echelon {
namespace {

void refuse_unpriced(const Plan& plan) {
  const auto unpriced = [](const std::string& given, const char* legal) {
    refuse("{}: a step with it is not priced; legal beside --machine: {}", given, legal);
  };
  if (plan.dtype != DType::f32) unpriced(std::string("--dtype ") + dtype_name(plan.dtype), "f32");
  if (plan.compression.kind != CompressionKind::none)
    unpriced(std::string("--compress ") + compression_text(plan.compression), "none");
  if (plan.offload != Offload::none) unpriced(std::string("--offload ") + offload_name(plan.offload), "none");
  if (!plan.optimizer_barrier) unpriced("--optimizer-barrier off", "on");
  if (!plan.schedule_text.empty()) unpriced("--schedule " + plan.schedule, "a name");
  if (plan.mask != AttentionMask::causal) unpriced("--mask document", "causal");
}

}  // namespace

Estimate price(const Plan& plan, const Machine& machine, const ExactMemory& exact_memory) {
  refuse_unpriced(plan);
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
