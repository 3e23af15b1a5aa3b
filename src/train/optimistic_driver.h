// Steps without an optimizer barrier: a rank that has completed its gradients guesses the optimizer's step
// (optimistic_step.h) and goes on into the next one's forward passes; then all have summed the norm, and the
// true step is made.
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
  HostNumbers squares_;               // of its gradients, over the pipeline
  std::vector<StepResult> finished_;  // since train() was called
};

}  // namespace echelon
