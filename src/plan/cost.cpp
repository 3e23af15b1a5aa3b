#include "plan/cost.h"

namespace echelon {

double predict_step_seconds(const Plan& plan, double peak_flops) {
  const ModelSpec& m = plan.model;
  const auto tokens = static_cast<double>(plan.global_batch * plan.seq_len);
  // One of attention's two forward products is computed again: causal, 2 FLOPs for each of (H D) T / 2.
  const double again = static_cast<double>(m.num_layers * m.attention_width() * plan.seq_len);
  return tokens * (model_flops_per_token(m, plan.seq_len) + again) / peak_flops;
}

}  // namespace echelon
