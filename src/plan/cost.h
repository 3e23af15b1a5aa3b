// Seconds of a training step, before anything runs. The measured twins are StepRecord::step_seconds and the
// timeline of a run.
#pragma once

#include <vector>

#include "schedule/pipeline_layout.h"
#include "schedule/simulate.h"
#include "spec/plan.h"
#include "spec/traffic.h"

namespace echelon {

// What the parts of a step take on one rank of a plan, by the clock (train/rehearsal).
struct PartSeconds {
  struct Passes {
    double forward = 0, backward = 0;
    Passes& operator*=(double factor) {
      forward *= factor;
      backward *= factor;
      return *this;
    }
  };
  // Of a full microbatch: one layer with attention and a dense MLP, one with experts or a state space, and
  // embedding and output layer together: with what they send along tp, cp and ep. Where layers have one part
  // each, the mean of those with attention or an MLP, and of the others; where all have experts, those with
  // attention are the first kind.
  Passes dense, others, ends;
  double element = 0;  // zeroing, norm and AdamW of one parameter and its gradient
  double call = 0;     // being in a call of a communicator that moves next to nothing
  double byte = 0;     // of each byte that a call sends
};

// The work of one data-parallel replica's pipeline ranks, each with cores of its own.
struct StepWork {
  SimulationCosts costs;       // of the stages' instructions, with what they communicate
  std::vector<double> behind;  // by pipeline rank: what follows its passes
};

// `traffic`: what each pipeline rank sends in a step.
StepWork step_work(const Plan& plan, const PipelineLayout& pipeline, const PartSeconds& parts,
                   const std::vector<Traffic>& traffic);

// Cores for a job: `wanted` is what a rank's threads fill.
struct JobCores {
  double cores = 1;   // for all ranks together
  double wanted = 1;  // by each of them
  bool are_shared(int ranks) const { return ranks * wanted > cores; }
};

struct StepPrediction {
  double seconds = 0;
  double bubble_fraction = 0;  // idle time of a pipeline rank over the pipeline's makespan, mean over ranks
};
// The plan's own schedule, simulated on these cores, and what follows it. Where ranks share cores nothing
// hides behind anything: the step takes at least the work of all ranks over the cores. Where the schedule
// does not flush: of a step in the middle of the stream.
StepPrediction predict_step(const Plan& plan, const PipelineLayout& pipeline, const StepWork& work,
                            const JobCores& cores);

// The measured timeline's twin: the last `shown` of so many steps, simulated with the times that instructions
// took. Of a schedule that flushes one step.
Timeline simulated_twin(const StepPrograms& programs, const SimulationCosts& costs, std::int64_t steps,
                        std::int64_t shown);

}  // namespace echelon
