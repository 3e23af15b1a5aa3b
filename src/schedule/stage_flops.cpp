#include "schedule/stage_flops.h"

#include <algorithm>

#include "spec/block_passes.h"

namespace echelon {

// Assumes that routed tokens are spread evenly.
static double share_of_tokens(const ModelSpec& m, const ParamSpec& spec) {
  return spec.expert < 0 ? 1.0
                         : static_cast<double>(m.experts_per_token) / static_cast<double>(m.num_experts);
}

double scan_flops(const StateSpaceSpec& s, std::int64_t seq_len) {
  const auto real = [](std::int64_t n) { return static_cast<double>(n); };
  const double rows = real(std::min(s.chunk, seq_len)), width = real(s.width()), state = real(s.state);
  // The delta rule multiplies keys with keys and with the state once more, and solves a triangular system for
  // its updates (half a square).
  const double delta = s.is_delta() ? rows * real(s.groups) * state + width * state + rows * width / 2 : 0;
  return 2 * (rows * real(s.groups) * state + rows * width + 2 * width * state +
              real(s.mixed_width() * s.kernel) + delta);
}

StageTimes stage_flops(const Plan& plan, const StageSlice& slice) {
  const ModelSpec& m = plan.model;
  const auto tp = static_cast<double>(plan.mesh.size(Axis::tp));
  const auto largest = static_cast<double>(microbatches(plan, 0).front().size());
  const double tokens = largest * static_cast<double>(plan.tokens_here());
  // The load of the busiest cp rank.
  const double imbalance = ContextLayout(plan).imbalance();
  double products = 0, attention = 0;  // of the forward pass: one product of each weight, and attention
  double back_products = 0, back_attention = 0;  // the same of parts that have a backward pass
  double gradients = 0;                          // of the products for the gradients of weights
  double again = 0;                              // what the backward pass makes again, or first
  StageTimes scans{0, 0, 0};
  const auto add = [&](const BlockProgram& program, std::int64_t layers, bool idle = false) {
    const auto count = static_cast<double>(layers);
    std::vector<double> forward;  // by op
    for (const BlockOp& op : program.ops) {
      double of_weights = 0, of_gradients = 0, of_attention = 0, of_scan = 0;
      const auto multiply = [&](const ParamSpec& spec) {
        if (!spec.multiplies) return;
        const double product = 2 * tokens * static_cast<double>(spec.numel()) * share_of_tokens(m, spec);
        of_weights += product;
        if (!spec.frozen) of_gradients += product;
      };
      for (const ParamSpec& spec : op.weights) multiply(spec);
      for (const Adapter& adapter : op.adapters) {
        multiply(adapter.a);
        multiply(adapter.b);
      }
      if (op.kind == OpKind::attention)
        of_attention =
            4 * tokens * static_cast<double>(m.attention_width()) * m.mean_keys(plan.seq_len) * imbalance;
      if (op.kind == OpKind::state_space) {
        const double scan = tokens * scan_flops(m.state_space, plan.seq_len);
        scans.forward += count * scan;
        if (!idle)
          scans.backward_input += 3.5 * count * scan;  // states and weights again, and twice the rest
        of_scan = scan;
      }
      if (op.kind == OpKind::short_conv) {
        of_scan = 2 * tokens * static_cast<double>(m.hidden * m.short_conv.kernel);
        scans.forward += count * of_scan;
        if (!idle) scans.backward_input += 3 * count * of_scan;  // once again, and both gradients
      }
      // The output layer runs in the backward pass, which has its two other products.
      forward.push_back(count * (of_weights + of_attention + of_scan));
      if (program.ends_in_loss()) {
        // Attention's backward pass has five products where the forward pass has two.
        again += 2 * of_weights + of_gradients + 3.5 * of_attention;
        continue;
      }
      products += count * of_weights;
      attention += count * of_attention;
      if (idle) continue;
      back_products += count * of_weights;
      back_attention += count * of_attention;
      gradients += count * of_gradients;
    }
    if (idle) return;
    for (const OpSequence& sequence : block_passes(program, slice.recompute).again)
      for (int op : sequence.ops) again += forward[static_cast<std::size_t>(op)];
  };
  if (m.tuning.freeze.empty() && !m.mixes_channels() && m.layer_pattern.empty()) {
    const std::int64_t dense_end = m.experts == Experts::none ? m.num_layers : m.num_dense_layers,
                       dense =
                           std::clamp<std::int64_t>(dense_end - slice.layers.begin, 0, slice.layers.size());
    if (dense > 0) add(layer_program(m, slice.layers.begin), dense);
    if (dense < slice.layers.size()) add(layer_program(m, slice.layers.end - 1), slice.layers.size() - dense);
  } else {  // no two layers need be alike
    for (std::int64_t i = 0; i < slice.layers.size(); ++i)
      add(layer_program(m, slice.layers.begin + i), 1, i + slice.embedding < slice.idle);
  }
  if (slice.head) add(slice.vocabulary_is_cut ? final_norm_program(m) : head_program(m), 1);
  // Attention's backward pass has five products where the forward pass has two.
  return {(products + attention + scans.forward) / tp,
          (back_products + 2.5 * back_attention + scans.backward_input + again) / tp, gradients / tp};
}

StageTimes vocabulary_part_flops(const Plan& plan) {
  const StageTimes head = stage_flops(plan, {{0, 0}, false, true});  // three products of one size
  const double product = head.backward_input / (3 * plan.mesh.pp());
  return {2 * product, 0, product};
}

SimulationCosts flops_of(const Plan& plan, const std::vector<StageSlice>& slices) {
  SimulationCosts costs;
  costs.stages.clear();
  for (const StageSlice& slice : slices) costs.stages.push_back(stage_flops(plan, slice));
  if (plan.cuts_vocabulary()) costs.vocabulary_part = vocabulary_part_flops(plan);
  return costs;
}

}  // namespace echelon
