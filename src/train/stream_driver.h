// Steps of a schedule without a flush (PipeDream, PipeDream-2BW): ranks start passes of the next step before
// those of this one end, and each stage takes its optimizer steps by itself, where its instruction list says
// so.
#pragma once

#include <optional>

#include "train/step_driver.h"
#include "train/weight_versions.h"

namespace echelon {

class StreamDriver final : public StepDriver {
 public:
  explicit StreamDriver(TrainingParts& parts);

  std::vector<StepResult> train(std::int64_t step, const SampleSource& samples,
                                std::int64_t steps_left) override;
  // The optimizer step of one stage, with the gradients accumulated since its last one. Clipping would need
  // the norm over all stages, so it is refused with such a schedule.
  void step(const Instruction& i) override;

 private:
  void before_pass(const Instruction& i) override;

  WeightVersions versions_;
  int updates_ = 0;  // of this rank, in the stream
  std::optional<LateResult> unfinished_;
};

}  // namespace echelon
