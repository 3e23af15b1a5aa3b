#include "schedule/stage_flops.h"

namespace echelon {

// Routed tokens are taken as spread evenly.
static double share_of_tokens(const ModelSpec& m, const ParamSpec& spec) {
  return spec.expert < 0 ? 1.0
                         : static_cast<double>(m.experts_per_token) / static_cast<double>(m.num_experts);
}

StageTimes stage_flops(const Plan& plan, const StageSlice& slice) {
  const ModelSpec& m = plan.model;
  const auto tp = static_cast<double>(plan.mesh.size(Axis::tp));
  const auto largest = static_cast<double>(microbatches(plan, 0).front().size());
  const double tokens = largest * static_cast<double>(plan.tokens_here());
  // The load of the cp rank that has most to do.
  const double imbalance = ContextLayout(plan).imbalance();
  double products = 0, attention = 0;  // of one of the three products of each weight; of attention forward
  for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer) {
    for (const ParamSpec& spec : block_parameters(m, layer))
      if (spec.multiplies)
        products += 2 * tokens * static_cast<double>(spec.numel()) * share_of_tokens(m, spec);
    attention += 2 * tokens * static_cast<double>(m.attention_width() * plan.seq_len) * imbalance;
  }
  const double head = slice.head ? 2 * tokens * static_cast<double>(m.vocab * m.hidden) : 0;
  // What is computed again: the layer but for its last product is counted whole.
  const double again = plan.recompute == Recompute::full        ? products + attention
                       : plan.recompute == Recompute::selective ? attention
                                                                : 0;
  // Attention's backward pass has five products where the forward pass has two.
  return {(products + attention) / tp, (products + 2.5 * attention + 3 * head + again) / tp, products / tp};
}

}  // namespace echelon
