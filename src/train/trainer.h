// One rank's training: data in, gradients, step. The same class on one rank and on any mesh.
#pragma once

#include <functional>
#include <memory>

#include "parallel/data_parallel.h"
#include "parallel/faults.h"
#include "spec/plan.h"
#include "train/held_stages.h"
#include "train/optimizer.h"

namespace echelon {

// Writes the `seq_len` tokens and targets of one sample; a target below zero is ignored. Depends on (step,
// sample) and fixed data only.
using SampleSource =
    std::function<void(std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets)>;

class Trainer {
 public:
  Trainer(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer, std::uint64_t seed,
          const Faults& faults = {});

  // Gradients of the mean loss over all target tokens of the global batch, summed over the mesh; returns that
  // loss.
  double compute_gradients(std::int64_t step, const SampleSource& samples);

  struct Applied {
    double gradient_norm = 0, learning_rate = 0;
  };
  // Clips and steps. RunError naming the first tensor when a gradient is not finite.
  Applied apply_gradients(std::int64_t step);

  // Mean loss over samples [0, num_samples) of the source, at the present parameters.
  double evaluate(std::int64_t num_samples, const SampleSource& samples);

  const ParameterStore& parameters() const { return parameters_; }
  const HeldStages& stages() const { return stages_; }
  // What this rank ran in the last step, and when.
  const PipelineRun& last_run() const { return last_run_; }
  const Plan& plan() const { return plan_; }
  const Rank& rank() const { return rank_; }

 private:
  Microbatch load(std::int64_t step, Range samples, const SampleSource& source);
  void finish_group(int group, DataParallel& data_parallel);
  [[noreturn]] void refuse_step(std::int64_t step, double learning_rate) const;
  void add_pipeline_copies();
  std::vector<double> sum_over(std::initializer_list<Axis> axes, const std::vector<double>& values) const;

  const Rank& rank_;
  Plan plan_;
  OptimizerOptions optimizer_;
  Faults faults_;
  PipelineLayout pipeline_;
  Schedule lowered_;
  ParameterStore parameters_;
  HeldStages stages_;
  PipelineRun last_run_;
};

}  // namespace echelon
