#include "parallel/softmax_blocks.h"

#include <algorithm>
#include <utility>

#include "spec/sum_blocks.h"

namespace echelon {

bool is_softmax_in_blocks(const Plan& plan) {
  const ModelSpec& m = plan.model;
  return plan.numerics == Numerics::invariant && !m.tied_embedding && m.caps.logits == 0 &&
         m.num_mtp_layers == 0 && !output_matrix(m).frozen;
}

SoftmaxBlocks::SoftmaxBlocks(const Rank& rank, const ParamSpec& matrix, Tensor table, Range here)
    : rank_(&rank), table_(std::move(table)), here_(here), bounds_{0} {
  const int blocks = num_sum_blocks({matrix});
  for (int b = 0; b < blocks; ++b) bounds_.push_back(local_ranges(matrix, blocks, b).front().end);
}

Range SoftmaxBlocks::columns(std::int64_t block) const {
  return {first_id(block) - first_id(0), first_id(block + 1) - first_id(0)};
}

Tensor SoftmaxBlocks::add_up(const Tensor& logits, const Tensor& targets) const {
  const std::int64_t rows = targets.numel();
  const Tensor numbers = rank_->statistic({3 * count() * rows});
  for (std::int64_t b = 0; b < count(); ++b) {
    const auto part = [&](std::int64_t which) {
      return numbers.flat_range((3 * b + which) * rows, (3 * b + which + 1) * rows);
    };
    const Range range = columns(b);
    const Tensor of_block = logits.column_range(range.begin, range.end);
    rank_->kernels().row_max(of_block, part(0));
    rank_->kernels().exp_sum(of_block, part(0), targets, first_id(b), part(1), part(2));
  }
  return numbers;
}

SoftmaxBlocks::Whole SoftmaxBlocks::merge(const Tensor& numbers, const Tensor& targets) const {
  const std::int64_t rows = targets.numel();
  const Tensor sum = rank_->statistic({rows}), target = rank_->statistic({rows}),
               scales = rank_->statistic({all() * rows}), shares = rank_->statistic({all() * rows});
  rank_->kernels().merge_softmax(numbers, targets, bounds_, sum, target, scales, shares);
  return {sum, target, scales};
}

Tensor SoftmaxBlocks::rounded(const Tensor& exponentials) const {
  const PrecisionRecipe& precision = rank_->precision();
  if (precision.statistics == precision.activations) return exponentials;
  const Tensor narrow = rank_->activation(exponentials.shape());
  rank_->kernels().copy(exponentials, narrow);
  return narrow;
}

void SoftmaxBlocks::multiply(std::int64_t block, const Tensor& rounded, const Tensor& y) const {
  const Range range = columns(block);
  rank_->kernels().matmul(rounded.column_range(range.begin, range.end), Transpose::no,
                          table_.row_range(range.begin, range.end), Transpose::no, y, false);
}

Tensor SoftmaxBlocks::target_rows(std::int64_t block, const Tensor& targets) const {
  const Range range = columns(block);
  const std::vector<std::int64_t> shape{targets.numel(), table_.cols()};
  const Tensor found = rank_->activation(shape);
  rank_->kernels().embedding(targets, table_.row_range(range.begin, range.end), first_id(block), found);
  const PrecisionRecipe& precision = rank_->precision();
  if (precision.statistics == precision.activations) return found;
  const Tensor wide = rank_->statistic(shape);
  rank_->kernels().copy(found, wide);
  return wide;
}

void SoftmaxBlocks::make_term(const Tensor& product, const Tensor& scales, const Tensor& of_target,
                              const Tensor& targets, double factor, const Tensor& y) const {
  // One over each scale: the gradient of a logit whose exponential is one and that no target has.
  const std::int64_t rows = targets.numel();
  const Tensor ones = rank_->statistic({rows, 1});
  rank_->kernels().fill(ones, 1.0);
  rank_->kernels().cross_entropy_backward(ones, scales, targets, bounds_.back(), 1, ones);
  rank_->kernels().merge_gradients(std::vector{product}, std::vector{ones.flat()}, std::vector{of_target},
                                   targets, factor, y);
}

void SoftmaxBlocks::make_gradients(const Tensor& exponentials, const Tensor& scales, const Tensor& targets,
                                   double factor, const Tensor& d_logits, std::int64_t first) const {
  const std::int64_t rows = targets.numel(), each = scales.numel() / std::max<std::int64_t>(1, count());
  for (std::int64_t b = 0; b < count(); ++b) {
    const Range range = columns(b);
    rank_->kernels().cross_entropy_backward(exponentials.column_range(range.begin, range.end),
                                            scales.flat_range(b * each + first, b * each + first + rows),
                                            targets, first_id(b), factor,
                                            d_logits.column_range(range.begin, range.end));
  }
}

}  // namespace echelon
