#include "plan/cost.h"

#include <algorithm>
#include <utility>

#include "schedule/schedules.h"

namespace echelon {

SimulationCosts stage_costs(const Plan& plan, const PipelineLayout& pipeline, double rank_flops) {
  SimulationCosts costs;
  costs.stages.clear();
  for (const StageSlice& slice : pipeline.slices()) {
    const StageTimes flops = stage_flops(plan, slice);
    costs.stages.push_back(
        {flops.forward / rank_flops, flops.backward_input / rank_flops, flops.backward_weight / rank_flops});
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

Timeline simulated_twin(const StepPrograms& programs, const SimulationCosts& costs, std::int64_t steps,
                        std::int64_t shown) {
  const Schedule& schedule = programs.schedule();
  if (programs.flushes()) return simulate(schedule, costs).timeline;
  shown = std::min(steps, shown);
  // Those before them fill the pipeline: more than fill it change nothing.
  const std::int64_t before = std::min<std::int64_t>(steps - shown, programs.shown_steps());
  const Schedule stream = make_schedule(schedule.name, schedule.num_ranks(), programs.microbatches(), 0,
                                        static_cast<int>(before + shown));
  return last_steps(simulate(stream, costs).timeline, programs.microbatches(), static_cast<int>(shown));
}

}  // namespace echelon
