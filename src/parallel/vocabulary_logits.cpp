#include "parallel/vocabulary_logits.h"

#include <limits>
#include <utility>
#include <vector>

#include "tensor/host.h"
#include "tensor/sum_by_blocks.h"

namespace echelon {

VocabularyLogits::VocabularyLogits(const Rank& rank, const ModelSpec& model, const ParamSpec& matrix,
                                   OutputWeights weights, std::int64_t first_id, SumBlocks blocks,
                                   Communicator* first)
    : rank_(&rank),
      weights_(std::move(weights)),
      first_id_(first_id),
      scale_(1 / model.scales.logits_divisor),
      cap_(model.caps.logits),
      blocks_(std::move(blocks)),
      first_(first) {
  const int tp = rank.size(Axis::tp);
  for (int i = 0; i < tp; ++i) cut_.push_back(local_ranges(matrix, tp, i)[0].size());
}

Tensor VocabularyLogits::make_chunk(std::int64_t rows) const {
  const std::int64_t columns = table().value.rows();
  return rank_->statistic({logits_rows_at_once(*rank_, rows), logits_row_stride(columns)})
      .column_range(0, columns);
}

void VocabularyLogits::multiply(const Tensor& x, const Tensor& logits) const {
  rank_->kernels().matmul({x, Transpose::no, table().value, Transpose::yes, logits, false},
                          {.bias = wide_bias()});
  if (scale_ != 1) rank_->kernels().scale(logits, scale_);
  if (cap_ > 0) rank_->kernels().soft_cap(logits, cap_);
}

void VocabularyLogits::add_weight_gradients(const Tensor& d_logits, const Tensor& x,
                                            std::span<const Tensor> gradients, bool onto) const {
  Kernels& kernels = rank_->kernels();
  if (table().gradient.defined())
    kernels.matmul(d_logits, Transpose::yes, x, Transpose::no, gradients.front(), onto);
  if (!weights_.bias.gradient.defined()) return;
  if (!onto) kernels.fill(gradients.back(), 0.0);
  kernels.bias_gradient(d_logits, gradients.back());
}

Tensor VocabularyLogits::wide_bias() const {
  const Tensor& bias = weights_.bias.value;
  if (!bias.defined() || bias.dtype() == rank_->precision().statistics) return bias;
  const Tensor wide = rank_->statistic(bias.shape());
  rank_->kernels().copy(bias, wide);
  return wide;
}

VocabularyLogits::Sums VocabularyLogits::exponentials(const Tensor& logits, const Tensor& targets) const {
  const std::int64_t rows = logits.rows();
  const bool has_part = logits.cols() > 0;
  const Tensor max = rank_->statistic({rows});
  if (has_part)
    rank_->kernels().row_max(logits, max);
  else
    rank_->kernels().fill(max, -std::numeric_limits<double>::infinity());
  sum(max, ReduceOp::max);
  // Side by side, so that one all_reduce carries both.
  const Tensor both = rank_->statistic({2 * rows});
  const Tensor sum = both.flat_range(0, rows), target = both.flat_range(rows, 2 * rows);
  if (has_part)
    add_exponentials(logits, max, targets, both);
  else
    rank_->kernels().fill(both, -0.0);
  this->sum(both, ReduceOp::sum);
  return {max, sum, target};
}

void VocabularyLogits::sum(const Tensor& numbers, ReduceOp op) const {
  if (first_ != nullptr) first_->all_reduce(numbers, op).wait();
  rank_->along(Axis::tp).all_reduce(numbers, op).wait();
}

// Over this rank's rows, and block by block where there are some: sums, and the target's logits behind them.
void VocabularyLogits::add_exponentials(const Tensor& logits, const Tensor& max, const Tensor& targets,
                                        const Tensor& both) const {
  const std::int64_t rows = logits.rows(), blocks = std::ssize(blocks_);
  Kernels& kernels = rank_->kernels();
  const auto make = [&](const Tensor& part, std::int64_t first_id, const Tensor& to) {
    kernels.exp_sum(part, max, targets, first_id, to.flat_range(0, rows), to.flat_range(rows, 2 * rows));
  };
  if (blocks == 0) return make(logits, first_id_, both);
  sum_by_blocks(
      kernels, blocks, both, [&] { return rank_->statistic({2 * rows}); },
      [&](std::int64_t b, const Tensor& to) {
        const Range range = blocks_[static_cast<std::size_t>(b)].front();
        make(logits.column_range(range.begin, range.end), first_id_ + range.begin, to);
      });
}

Tensor VocabularyLogits::gathered(const Tensor& x) const {
  const Tensor here = rank_->statistic({1, table().value.rows()});
  multiply(x, here);
  std::int64_t all = 0;
  for (std::int64_t rows : cut_) all += rows;
  const Tensor whole = rank_->statistic({1, all});
  rank_->along(Axis::tp).all_gather(here.flat(), whole.flat(), cut_).wait();
  return whole;
}

Tensor VocabularyLogits::make_loss() const {
  const Tensor loss(rank_->arena(), MemoryCategory::other, DType::f64, {1});
  fill_with_zero(loss);
  return loss;
}

}  // namespace echelon
