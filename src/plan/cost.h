// Seconds of a training step, before anything runs. The measured twins are StepRecord::step_seconds and the
// timeline of a run.
#pragma once

#include "schedule/pipeline_layout.h"
#include "schedule/simulate.h"
#include "spec/plan.h"

namespace echelon {

// Rates measured on this machine.
struct ComputeRates {
  double all_flops = 0;   // of all compute threads together on matrix products
  double rank_flops = 0;  // of one rank's threads while the other ranks wait
};

// Seconds of each stage's instructions for a full microbatch, from their FLOPs: what moves memory only
// (norms, activations, optimizer) and the messages are left out, so it is a lower bound that a good run comes
// close to.
SimulationCosts stage_costs(const Plan& plan, const PipelineLayout& pipeline, double rank_flops);

struct StepPrediction {
  double seconds = 0;
  double bubble_fraction = 0;  // idle time of a pipeline rank over the step, mean over ranks
};
// The makespan of the plan's own schedule, simulated with stage_costs(); or, where ranks share cores, the
// step's FLOPs over the rate of all of them, if that is longer.
// Where the schedule does not flush: of a step in the middle of the stream.
StepPrediction predict_step(const Plan& plan, const PipelineLayout& pipeline, const ComputeRates& rates);

// The measured timeline's twin: the last `shown` of so many steps, simulated with the times that instructions
// took. Of a schedule that flushes one step.
Timeline simulated_twin(const StepPrograms& programs, const SimulationCosts& costs, std::int64_t steps,
                        std::int64_t shown);

}  // namespace echelon
