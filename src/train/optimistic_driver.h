// Steps without an optimizer barrier: a rank that has completed its gradients guesses the optimizer step
// (optimistic_step.h) and continues with the next step's forward passes. Once the norm is summed over all
// ranks, the true step is made.
#pragma once

#include <optional>

#include "train/optimistic_step.h"
#include "train/step_driver.h"

namespace echelon {

class OptimisticDriver final : public StepDriver {
 public:
  explicit OptimisticDriver(TrainingParts& parts)
      : StepDriver(parts), guessed_(parts.rank, parts.parameters) {}

  std::vector<StepResult> train(std::int64_t step, const SampleSource& samples,
                                std::int64_t steps_left) override;
  bool validate() override;

 private:
  bool make_true_step();

  OptimisticStep guessed_;
  std::optional<LateResult> unfinished_;
  HostNumbers squares_;               // of its gradients, summed over the pipeline
  std::vector<StepResult> finished_;  // in this call of train()
};

}  // namespace echelon
