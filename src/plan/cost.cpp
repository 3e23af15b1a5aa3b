#include "plan/cost.h"

#include <algorithm>
#include <utility>

#include "schedule/schedules.h"

namespace echelon {

SimulationCosts stage_costs(const Plan& plan, const PipelineLayout& pipeline, double rank_flops) {
  const ModelSpec& m = plan.model;
  const auto tp = static_cast<double>(plan.mesh.size(Axis::tp));
  const auto largest = static_cast<double>(microbatches(plan, 0).front().size());
  const double tokens = largest * static_cast<double>(plan.seq_len);
  SimulationCosts costs;
  costs.stages.clear();
  for (const StageSlice& slice : pipeline.slices()) {
    double products = 0,
           attention = 0;  // FLOPs of one of the three products of each weight; of attention forward
    for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer) {
      for (const ParamSpec& spec : block_parameters(m, layer))
        if (spec.multiplies) products += 2 * tokens * static_cast<double>(spec.numel());
      attention += 2 * tokens * static_cast<double>(m.attention_width() * plan.seq_len);
    }
    const double head = slice.head ? 2 * tokens * static_cast<double>(m.vocab * m.hidden) : 0;
    // What is computed again: the layer but for its last product is counted whole.
    const double again = plan.recompute == Recompute::full        ? products + attention
                         : plan.recompute == Recompute::selective ? attention
                                                                  : 0;
    // Attention's backward pass has five products where the forward pass has two.
    costs.stages.push_back({(products + attention) / tp / rank_flops,
                            (products + 2.5 * attention + 3 * head + again) / tp / rank_flops,
                            products / tp / rank_flops});
  }
  return costs;
}

// Makespan and mean busy time of a rank in a step. Where no barrier parts the steps: what one more adds to
// them.
static std::pair<double, double> step_and_busy(const StepPrograms& programs, const SimulationCosts& costs,
                                               bool barrier) {
  const auto measures = [&](const Schedule& schedule) {
    const Timeline timeline = simulate(schedule, costs).timeline;
    double busy = 0;
    for (int r = 0; r < schedule.num_ranks(); ++r) busy += timeline.busy(r) / schedule.num_ranks();
    return std::pair{timeline.makespan(), busy};
  };
  const Schedule& shown = programs.schedule();
  const auto all = measures(shown);
  if (programs.flushes() && barrier) return all;
  const auto longer =
      measures(programs.flushes() ? repeated(shown, 2)
                                  : make_schedule(shown.name, shown.num_ranks(), programs.microbatches(), 0,
                                                  programs.shown_steps() + 1));
  return {longer.first - all.first, longer.second - all.second};
}

StepPrediction predict_step(const Plan& plan, const PipelineLayout& pipeline, const ComputeRates& rates) {
  const auto [step, busy] = step_and_busy(pipeline.programs(0), stage_costs(plan, pipeline, rates.rank_flops),
                                          plan.optimizer_barrier);
  StepPrediction prediction;
  prediction.bubble_fraction = std::max(0.0, 1 - busy / step);
  const auto tokens = static_cast<double>(plan.global_batch * plan.seq_len);
  const auto again = static_cast<double>(plan.model.num_layers * plan.model.attention_width() * plan.seq_len);
  prediction.seconds =
      std::max(step, tokens * (model_flops_per_token(plan.model, plan.seq_len) + again) / rates.all_flops);
  return prediction;
}

}  // namespace echelon
