// Predicts the seconds of a training step before anything runs. The measured twins are
// StepRecord::step_seconds and the timeline of a run.
#pragma once

#include <vector>

#include "schedule/pipeline_layout.h"
#include "schedule/simulate.h"
#include "spec/plan.h"
#include "spec/traffic.h"

namespace echelon {

// How long the parts of a step take on one rank of a plan, measured by train/rehearsal.
struct PartSeconds {
  struct Passes {
    double forward = 0, backward = 0;
    Passes& operator*=(double factor) {
      forward *= factor;
      backward *= factor;
      return *this;
    }
  };
  // Passes of a full microbatch, with what they send along tp, cp and ep: of a layer with attention and a
  // dense MLP (`dense`), of one with experts or a state space (`others`), and of embedding and output layer
  // together (`ends`). In models whose layers have one part each: the mean over layers with attention or an
  // MLP, and over the others. If all layers have experts, those with attention are `dense`.
  Passes dense, others, ends;
  double element = 0;  // zeroing, norm and AdamW of one parameter and its gradient
  double muon = 0;     // for each FLOP that makes matrices orthogonal (muon_flops())
  double call = 0;     // overhead of a call of a communicator, which moves next to nothing
  double byte = 0;     // for each byte that a call sends
};

// The work of the pipeline ranks of one data-parallel replica, each with its own cores.
struct StepWork {
  SimulationCosts costs;       // of the stages' instructions, including their communication
  std::vector<double> behind;  // by pipeline rank: what follows its passes
};

// `traffic`: what each pipeline rank sends in a step.
StepWork step_work(const Plan& plan, const PipelineLayout& pipeline, const PartSeconds& parts,
                   const std::vector<Traffic>& traffic);

// Cores for a job: `wanted` is the number that one rank's threads keep busy.
struct JobCores {
  double cores = 1;   // for all ranks together
  double wanted = 1;  // by each rank
  bool are_shared(int ranks) const { return ranks * wanted > cores; }
};

struct StepPrediction {
  double seconds = 0;
  double bubble_fraction = 0;  // idle time of a pipeline rank over the pipeline's makespan, mean over ranks
};
// Simulates the plan's own schedule on these cores, and adds what follows it. If ranks share cores, nothing
// is hidden behind anything else: the step takes at least the work of all ranks divided by the cores. If the
// schedule does not flush: a step in the middle of the stream.
StepPrediction predict_step(const Plan& plan, const PipelineLayout& pipeline, const StepWork& work,
                            const JobCores& cores);

// The predicted twin of the measured timeline: the last `shown` of `steps` steps, simulated with the measured
// times of instructions. If the schedule flushes: one step.
Timeline simulated_twin(const StepPrograms& programs, const SimulationCosts& costs, std::int64_t steps,
                        std::int64_t shown);

}  // namespace echelon
