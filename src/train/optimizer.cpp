#include "train/optimizer.h"

#include <cmath>
#include <numbers>

#include "base/error.h"

namespace echelon {

void validate(const OptimizerOptions& o) {
  const auto positive = [](const char* flag, double value) {
    if (!(value > 0) || !std::isfinite(value)) refuse("{} {}: must be a number above 0", flag, value);
  };
  const auto not_negative = [](const char* flag, double value) {
    if (!(value >= 0) || !std::isfinite(value)) refuse("{} {}: must be a number of at least 0", flag, value);
  };
  positive("--lr", o.lr);
  not_negative("--min-lr", o.min_lr);
  if (o.min_lr > o.lr) refuse("--min-lr {}: must not be above --lr {}", o.min_lr, o.lr);
  not_negative("--warmup", static_cast<double>(o.warmup_steps));
  not_negative("--weight-decay", o.weight_decay);
  not_negative("--clip", o.clip);
}

double learning_rate(const OptimizerOptions& o, std::int64_t step) {
  if (step < o.warmup_steps)
    return o.lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup_steps);
  if (step >= o.total_steps) return o.min_lr;
  const double progress =
      static_cast<double>(step - o.warmup_steps) / static_cast<double>(o.total_steps - o.warmup_steps);
  return o.min_lr + 0.5 * (o.lr - o.min_lr) * (1.0 + std::cos(std::numbers::pi * progress));
}

double global_gradient_norm(const Rank& rank, const ParameterStore& parameters) {
  const int tp = rank.size(Axis::tp), index = rank.coordinate(Axis::tp);
  const auto count = static_cast<std::int64_t>(parameters.model().size());
  const Tensor squares(rank.arena(), MemoryCategory::other, DType::f64, {count});
  double* sums = squares.data<double>();
  for (std::int64_t i = 0; i < count; ++i) {
    const Parameter* p = parameters.find_here(parameters.model()[static_cast<std::size_t>(i)].name);
    // Of ranks that hold the same elements only the first counts them.
    const bool mine = p != nullptr && index % tp_replicas(p->spec, tp) == 0 &&
                      p->holders.front() == rank.coordinate(Axis::pp) && p->gradient.numel() > 0;
    sums[i] = mine ? rank.kernels().sum_squares(p->gradient) : 0.0;
  }
  for (Axis axis : {Axis::tp, Axis::pp}) rank.along(axis).all_reduce(squares).wait();
  double total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += sums[i];
  return std::sqrt(total);
}

double clip_factor(double norm, double clip) { return clip > 0 && norm > clip ? clip / norm : 1.0; }

void adamw_step(const Rank& rank, const ParameterStore& parameters, const OptimizerOptions& options,
                double learning_rate, std::int64_t updates, double gradient_scale) {
  AdamWStep update;
  update.lr = learning_rate;
  update.beta1 = options.beta1;
  update.beta2 = options.beta2;
  update.eps = options.eps;
  update.step = updates + 1;
  update.gradient_scale = gradient_scale;
  for (const Parameter& p : parameters.all()) {
    if (p.value.numel() == 0) continue;
    update.weight_decay = p.spec.decay ? options.weight_decay : 0.0;
    rank.kernels().adamw(p.value, p.gradient, p.exp_avg, p.exp_avg_sq, update);
  }
}

}  // namespace echelon
