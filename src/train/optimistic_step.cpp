#include "train/optimistic_step.h"

#include <algorithm>

#include "base/error.h"
#include "tensor/host.h"

namespace echelon {

OptimisticStep::OptimisticStep(const Rank& rank, const ParameterStore& parameters)
    : rank_(&rank),
      parameters_(&parameters),
      guessed_(rank.arena(), MemoryCategory::parameters, rank.precision().parameters,
               parameters.values().shape()),
      exp_avg_(rank.arena(), MemoryCategory::optimizer, rank.precision().moments, {guessed_moments}),
      exp_avg_sq_(rank.arena(), MemoryCategory::optimizer, rank.precision().moments, {guessed_moments}) {
  if (rank.precision().has_master())
    remainder_ = Tensor(rank.arena(), MemoryCategory::optimizer, DType::i16, {guessed_moments});
}

void OptimisticStep::guess(const OptimizerOptions& options, double learning_rate, std::int64_t updates) {
  check(!is_guess_, "a guess is taken back before the next one");
  const Doing doing = rank_->doing(Activity::optimizer);
  Kernels& kernels = rank_->kernels();
  kernels.copy(parameters_->values(), guessed_);
  for (std::size_t k = 0; k < parameters_->all().size(); ++k) {
    const Parameter& p = parameters_->all()[k];
    if (p.spec.frozen) continue;
    const AdamWStep update = adamw_update(p.spec, options, learning_rate, updates, 1.0);
    const std::int64_t offset = parameters_->layout().offsets[k], count = p.value.numel();
    for (std::int64_t begin = 0; begin < count; begin += guessed_moments) {
      const std::int64_t end = std::min(begin + guessed_moments, count);
      const Tensor first = exp_avg_.flat_range(0, end - begin),
                   second = exp_avg_sq_.flat_range(0, end - begin);
      copy_anywhere(kernels, p.exp_avg.flat_range(begin, end), first);
      copy_anywhere(kernels, p.exp_avg_sq.flat_range(begin, end), second);
      Tensor remainder;
      if (remainder_.defined()) {
        remainder = remainder_.flat_range(0, end - begin);
        kernels.copy(p.own_remainder.flat_range(begin, end), remainder);
      }
      adamw_part(*rank_, *parameters_, p, {begin, end},
                 {guessed_.flat_range(offset + begin, offset + end), remainder,
                  p.gradient.flat_range(begin, end), first, second},
                 update);
    }
  }
  Tensor::swap_memory(parameters_->values(), guessed_);
  is_guess_ = true;
}

void OptimisticStep::take_back() {
  if (is_guess_) Tensor::swap_memory(parameters_->values(), guessed_);
  is_guess_ = false;
}

}  // namespace echelon
