#include "spec/plan.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {
DType parse_dtype(const std::string& text, const std::string& field) {
  if (text == "f32") return DType::f32;
  if (text == "f64") return DType::f64;
  if (text == "bf16") return DType::bf16;
  refuse("{} {}: no such type; legal: f32, f64, bf16", field, text);
}

const char* offloaded_words(Offload offload) {
  switch (offload) {
    case Offload::none:
      break;
    case Offload::optimizer:
      return "optimizer state";
    case Offload::activations:
      return "activations";
    case Offload::both:
      return "optimizer state and activations";
  }
  return "nothing";
}

bool interleaves_pairs(const Plan& plan) { return plan.mesh.ep > 1 && plan.zero_stage() < 3; }

Range dp_samples(const Plan& plan, int dp_rank) {
  return split_range(plan.global_batch, plan.mesh.size(Axis::dp), dp_rank);
}

std::int64_t sequences_at_once(const Plan& plan) {
  return std::min(plan.micro_batch, dp_samples(plan, 0).size());
}

std::vector<Range> microbatches(const Plan& plan, int dp_rank) {
  const Range samples = dp_samples(plan, dp_rank);
  std::vector<Range> batches;
  for (std::int64_t begin = samples.begin; begin < samples.end; begin += plan.micro_batch)
    batches.push_back({begin, std::min(begin + plan.micro_batch, samples.end)});
  if (plan.zero_stage() >= 2 || plan.mesh.ep > 1) {
    const std::int64_t most = dp_samples(plan, 0).size();
    batches.resize(static_cast<std::size_t>((most + plan.micro_batch - 1) / plan.micro_batch),
                   {samples.end, samples.end});
  }
  return batches;
}

}  // namespace echelon
