// The optimizer's step: AdamW with decoupled weight decay (Loshchilov & Hutter 2019), or Muon for the
// matrices of layers (muon.h); global-norm clipping, and the learning-rate schedule.
#pragma once

#include <optional>
#include <vector>

#include "model/parameters.h"

namespace echelon {

struct OptimizerOptions {
  double lr = 1e-3;
  double min_lr = 1e-4;
  std::int64_t warmup_steps = 10;
  std::int64_t total_steps = 100;  // the cosine reaches min_lr here
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;
  double clip = 1.0;  // limit of the global gradient norm; 0: none
};

// RequestError naming the flag.
void validate(const OptimizerOptions& options);

// The learning rate: linear warm-up to lr over warmup_steps, then a cosine to min_lr at total_steps, then
// min_lr. `step` counts from 0.
double learning_rate(const OptimizerOptions& options, std::int64_t step);

// For each parameter of the model, the sum of squares of its gradient; each logical element counts once on
// any mesh. 0 for parameters that this pipeline rank does not count. Sums are in double precision: over
// blocks of a parameter (norm_block), then over groups of blocks (norm_blocks_at_once), then over these.
// Collective over tp and, if state is sharded, dp.
class GradientSquares {
 public:
  // Queues the sums on the device.
  GradientSquares(const Rank& rank, const ParameterStore& parameters);
  // Waits for the sums; call once.
  std::vector<double> get();

 private:
  // Experts, or all others; the two are sharded over different ranks.
  struct Part {
    std::vector<const Parameter*> counted;
    Communicator* group;  // null: each rank has all
    // sums: of norm_blocks_at_once blocks of a parameter, if there is no group.
    Tensor blocks, sums;
  };
  std::vector<double> of_parameters();

  const Rank& rank_;
  const ParameterStore& parameters_;
  std::vector<Part> parts_;
};
// The Euclidean norm, from the squares of all pipeline ranks added in the order of parameters.
double norm_of_squares(const std::vector<double>& squares);
// The norm of the whole gradient. Collective over tp, dp and pp.
double global_gradient_norm(const Rank& rank, GradientSquares& squares);

// The same under invariant numerics: squares are summed without rounding, so that the result does not depend
// on how parameters are cut or laid out.
double invariant_gradient_norm(const Rank& rank, const ParameterStore& parameters);

// The factor of the gradients that limits their norm to `clip`.
double clip_factor(double norm, double clip);

// The kernel's arguments for the update of one parameter.
AdamWStep adamw_update(const ParamSpec& spec, const OptimizerOptions& options, double learning_rate,
                       std::int64_t updates, double gradient_scale);

// How elements `part` of what a rank has of a parameter are rounded in its step number `step`, if weights are
// kept in bf16 alone; null otherwise.
class WeightRounding {
 public:
  WeightRounding(const Rank& rank, const ParameterStore& parameters, const Parameter& parameter, Range part,
                 std::int64_t step);
  WeightRounding(const WeightRounding&) = delete;
  WeightRounding& operator=(const WeightRounding&) = delete;
  const StochasticRounding* get() const { return rounding_ ? &*rounding_ : nullptr; }

 private:
  std::vector<LogicalRun> runs_;
  std::optional<StochasticRounding> rounding_;
};

// The tensors of an update: a parameter's own, or copies. adamw_part() updates elements `part` of what a rank
// has.
struct Updated {
  Tensor value, remainder, gradient, exp_avg, exp_avg_sq;  // no remainder if the values are the weights
};
void adamw_part(const Rank& rank, const ParameterStore& parameters, const Parameter& parameter, Range part,
                const Updated& updated, AdamWStep update);

// One step on all elements that this rank owns, `updates` steps after the first; then new values go to all
// ranks that hold them whole (collective over dp). Norms and biases have no weight decay.
void optimizer_step(const Rank& rank, const ParameterStore& parameters, const OptimizerOptions& options,
                    double learning_rate, std::int64_t updates, double gradient_scale);

}  // namespace echelon
