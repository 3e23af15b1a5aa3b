// AdamW with decoupled weight decay (Loshchilov & Hutter 2019), global-norm clipping, and the learning-rate
// schedule.
#pragma once

#include <vector>

#include "model/parameters.h"

namespace echelon {

struct OptimizerOptions {
  double lr = 1e-3;
  double min_lr = 1e-4;
  std::int64_t warmup_steps = 10;
  std::int64_t total_steps = 100;  // where the cosine reaches min_lr
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;
  double clip = 1.0;  // of the global gradient norm; 0: none
};

// Throws RequestError naming the flag.
void validate(const OptimizerOptions& options);

// Linear warm-up to lr over warmup_steps, then a cosine to min_lr at total_steps, then min_lr. `step` counts
// from 0.
double learning_rate(const OptimizerOptions& options, std::int64_t step);

// Sum of squares of each of the model's parameters' gradients, each logical element counted once on any
// mesh: of the parameters that this pipeline rank counts, 0 for the others. Squares are added in double
// precision over blocks of a parameter (norm_block), then over some blocks (norm_blocks_at_once), then over
// these sums. Collective over tp and, where state is cut over it, dp.
class GradientSquares {
 public:
  // Tells the device to add them up.
  GradientSquares(const Rank& rank, const ParameterStore& parameters);
  // Waits for it; once.
  std::vector<double> get();

 private:
  // Of experts or of the others, which are cut over different ranks.
  struct Part {
    std::vector<const Parameter*> counted;
    Communicator* group;  // null: each rank has all
    Tensor blocks, sums;  // sums: of norm_blocks_at_once blocks of a parameter, where there is no group
  };
  std::vector<double> of_parameters();

  const Rank& rank_;
  const ParameterStore& parameters_;
  std::vector<Part> parts_;
};
// Euclidean norm from the squares of all pipeline ranks, added in the order of parameters.
double norm_of_squares(const std::vector<double>& squares);
// The norm of the whole gradient. Collective over tp, dp and pp.
double global_gradient_norm(const Rank& rank, GradientSquares& squares);

// The same under invariant numerics: every element's square is summed without rounding, so that the sum shows
// neither how parameters are cut nor how their elements lie.
double invariant_gradient_norm(const Rank& rank, const ParameterStore& parameters);

// What the gradients are multiplied by so that their norm is at most `clip`.
double clip_factor(double norm, double clip);

// What the kernel needs to know of an update of one parameter.
AdamWStep adamw_update(const ParamSpec& spec, const OptimizerOptions& options, double learning_rate,
                       std::int64_t updates, double gradient_scale);

// Updates elements `part` of what a rank has of a parameter: it, or copies of it.
struct Updated {
  Tensor value, remainder, gradient, exp_avg, exp_avg_sq;  // no remainder where the values are the weights
};
void adamw_part(const Rank& rank, const ParameterStore& parameters, const Parameter& parameter, Range part,
                const Updated& updated, AdamWStep update);

// One step on everything that is this rank's own, `updates` steps after the first; then the values go to all
// ranks that hold them whole (collective over dp). Norms and biases do not decay.
void adamw_step(const Rank& rank, const ParameterStore& parameters, const OptimizerOptions& options,
                double learning_rate, std::int64_t updates, double gradient_scale);

}  // namespace echelon
