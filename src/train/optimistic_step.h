// The optimizer's step without a barrier (post-validation; Qi et al. 2023, section 4,
// https://arxiv.org/abs/2401.10241): a rank that has ended its part of a step does not know the gradient norm
// over all stages yet. It guesses that nothing is clipped, goes on with the weights that follow from that,
// and keeps everything that the true step needs. The true step is then made by the same code as with a
// barrier, from the same state: a wrong guess leaves no trace.
#pragma once

#include "train/optimizer.h"

namespace echelon {

class OptimisticStep {
 public:
  // Keeps a second version of the rank's weights, and room for the moments of a few parameters' elements.
  OptimisticStep(const Rank& rank, const ParameterStore& parameters);

  // What the layers see becomes what adamw_step() would make of it with these arguments and no clipping;
  // weights, gradients and moments stay as they are.
  void guess(const OptimizerOptions& options, double learning_rate, std::int64_t updates);
  // The layers see the true weights again.
  void take_back();

 private:
  const Rank* rank_;
  const ParameterStore* parameters_;
  Tensor guessed_;  // values, or the true ones while the guess is what the layers see
  Tensor exp_avg_, exp_avg_sq_, remainder_;
  bool is_guess_ = false;
};

}  // namespace echelon
