// The optimizer step without a barrier (post-validation; Qi et al. 2023, section 4,
// https://arxiv.org/abs/2401.10241). A rank that has finished its part of a step does not know the gradient
// norm over all stages yet. It guesses that nothing is clipped, continues with the resulting weights, and
// keeps everything that the true step needs. The true step is then made by the same code as with a barrier,
// from the same state: a wrong guess leaves no trace.
#pragma once

#include "train/optimizer.h"

namespace echelon {

class OptimisticStep {
 public:
  // Allocates a second version of the rank's weights, and space for the moments of some elements of a
  // parameter.
  OptimisticStep(const Rank& rank, const ParameterStore& parameters);

  // Layers now see the result of optimizer_step() with these arguments and no clipping; weights, gradients
  // and moments are unchanged.
  void guess(const OptimizerOptions& options, double learning_rate, std::int64_t updates);
  // Layers see the true weights again.
  void take_back();

 private:
  const Rank* rank_;
  const ParameterStore* parameters_;
  Tensor guessed_;  // the guess, or the true values while layers see the guess
  Tensor exp_avg_, exp_avg_sq_, remainder_;
  bool is_guess_ = false;
};

}  // namespace echelon
