// Steps that end one by one: the schedule flushes, and the optimizer has its barrier. The sequence: all
// passes, the gradients of the whole mesh, their norm over all stages, the optimizer step.
#pragma once

#include <memory>
#include <span>

#include "train/optimizer.h"
#include "train/step_driver.h"

namespace echelon {

class FlushDriver final : public StepDriver {
 public:
  using StepDriver::StepDriver;

  std::vector<StepResult> train(std::int64_t step, const SampleSource& samples,
                                std::int64_t steps_left) override;
  // See Trainer.
  double compute_gradients(std::int64_t step, const SampleSource& samples);
  StepResult apply_gradients(std::int64_t step, double loss);
  const std::vector<RoutingCounts>& routing() const { return routing_; }
  double mtp_loss() const { return mtp_loss_; }

 private:
  // Runs the passes of a step, and queues (or performs) the sums over the mesh.
  void run_passes(std::int64_t step, const SampleSource& samples);
  // Null under invariant numerics.
  std::unique_ptr<GradientSquares> begin_norm();
  double take_loss();
  StepResult update(std::int64_t step, double loss, std::unique_ptr<GradientSquares> squares);
  void count_routing();
  std::vector<double> sum_over_ranks(std::span<const double> numbers) const;

  std::vector<RoutingCounts> routing_;
  double mtp_loss_ = 0;
};

}  // namespace echelon
