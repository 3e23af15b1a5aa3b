#include "train/optimistic_driver.h"

#include <cmath>
#include <utility>

namespace echelon {

std::vector<StepResult> OptimisticDriver::train(std::int64_t step, const SampleSource& samples,
                                                std::int64_t steps_left) {
  const Rank& rank = parts_.rank;
  begin(step, samples);
  prepare(0);
  run(parts_.programs.program(0, 1));  // validates the step before
  parts_.gradients.finish_with_pipeline();
  unfinished_.emplace(parts_, step, take_loss_sums(), num_targets());
  std::vector<double> squares;
  {
    const Doing doing = rank.doing(Activity::gradient_norm);
    squares = GradientSquares(rank, parts_.parameters).get();
  }
  // What this rank has counted is part of the norm: where that is too much, it knows that it must clip, and
  // waits.
  const double norm_here = norm_of_squares(squares);
  squares_ = HostGroup(rank.along(Axis::pp)).begin_sum(squares);
  if (steps_left == 1)
    make_true_step();
  else if (std::isfinite(norm_here) && clip_factor(norm_here, parts_.optimizer.clip) == 1)
    guessed_.guess(parts_.optimizer, unfinished_->result.learning_rate, parts_.updates(step));
  return std::exchange(finished_, {});
}

// The step whose result is still unknown, with all that is known now. Whether nothing was clipped.
bool OptimisticDriver::make_true_step() {
  guessed_.take_back();
  StepResult& result = unfinished_->result;
  result.gradient_norm = norm_of_squares(squares_.get());
  if (!std::isfinite(result.gradient_norm)) refuse_step(result.step, 0);
  const double factor = clip_factor(result.gradient_norm, parts_.optimizer.clip);
  optimizer_step(parts_.rank, parts_.parameters, parts_.optimizer, result.learning_rate,
                 parts_.updates(result.step), factor);
  finished_.push_back(unfinished_->finish());
  unfinished_.reset();
  return factor == 1;
}

bool OptimisticDriver::validate() {
  bool right = true;
  if (unfinished_) {
    const auto& distrusts = parts_.hooks.distrusts_guess;
    const std::int64_t step = unfinished_->result.step;
    right = make_true_step() && !(distrusts && distrusts(step));
    finished_.back().taken_back = !right;
  }
  if (!parts_.gradients.begun()) parts_.gradients.begin(parts_.updates(first_step_));
  if (!right) forget_forwards();
  return right;
}

}  // namespace echelon
