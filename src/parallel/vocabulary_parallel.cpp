#include "parallel/vocabulary_parallel.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "tensor/host.h"

namespace echelon {
namespace {

template <class Visit>
void for_each_chunk(std::int64_t rows, const Visit& visit) {
  for (std::int64_t begin = 0; begin < rows; begin += logits_chunk_rows)
    visit(Range{begin, std::min(begin + logits_chunk_rows, rows)});
}

}  // namespace

VocabularyParallel::VocabularyParallel(const Rank& rank, const Plan& plan, Weight table)
    : rank_(&rank),
      tensor_parallel_(rank, plan.sequence_parallel),
      table_(std::move(table)),
      vocabulary_(plan.model.vocab),
      scale_(1 / plan.model.scales.logits_divisor) {
  const int parts = rank.size(Axis::pp), tp = rank.size(Axis::tp);
  ParamSpec matrix = output_matrix(plan.model);
  matrix.parts = parts;
  for (matrix.part = 0; matrix.part < parts; ++matrix.part)
    bounds_.push_back(local_ranges(matrix, tp, 0)[0].begin);
  bounds_.push_back(vocabulary_);
  matrix.part = rank.coordinate(Axis::pp);
  first_id_ = local_ranges(matrix, tp, rank.coordinate(Axis::tp))[0].begin;
}

void VocabularyParallel::multiply(const Tensor& x, const Tensor& logits) const {
  rank_->kernels().matmul(x, Transpose::no, table_.value, Transpose::yes, logits, false);
  if (scale_ != 1) rank_->kernels().scale(logits, scale_);
}

void VocabularyParallel::add_up(const Tensor& logits, const Tensor& targets, const Tensor& sums,
                                Range chunk) const {
  Kernels& kernels = rank_->kernels();
  Communicator& group = rank_->along(Axis::tp);
  const std::int64_t rows = sums.numel() / 3, count = chunk.size();
  const auto of = [&](std::int64_t which) {
    return sums.flat_range(which * rows + chunk.begin, which * rows + chunk.end);
  };
  const Tensor max = of(0), ids = targets.flat_range(chunk.begin, chunk.end);
  kernels.row_max(logits, max);
  group.all_reduce(max, ReduceOp::max).wait();
  const Tensor sum_and_target = rank_->statistic({2 * count});
  const Tensor sum = sum_and_target.flat_range(0, count),
               target = sum_and_target.flat_range(count, 2 * count);
  kernels.exp_sum(logits, max, ids, first_id_, sum, target);
  group.all_reduce(sum_and_target).wait();
  kernels.copy(sum, of(1));
  kernels.copy(target, of(2));
}

VocabularyParallel::Part VocabularyParallel::forward(const Tensor& hidden, const Tensor& targets,
                                                     Saved& saved) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = targets.numel(), width = table_.value.rows(), C = hidden.cols();
  const Tensor x = tensor_parallel_.enter(hidden, rows).get();
  saved = {hidden, rank_->statistic({rows, width})};
  Part part{make_gradient(rows), make_sums(rows)};
  const std::int64_t here = hidden.rows();
  // By probabilities, then the targets' rows: sums over the tp group.
  const Tensor mean = rank_->activation({rows, C}),
               gradients = rank_->activation({std::min(rows, logits_chunk_rows), width});
  for_each_chunk(rows, [&](Range chunk) {
    const Tensor logits = saved.exponentials.row_range(chunk.begin, chunk.end),
                 probabilities = gradients.row_range(0, chunk.size());
    multiply(x.row_range(chunk.begin, chunk.end), logits);
    add_up(logits, targets, part.sums, chunk);
    // As if no target were here.
    kernels.cross_entropy_backward(logits, part.sums.flat_range(rows + chunk.begin, rows + chunk.end),
                                   targets.flat_range(chunk.begin, chunk.end), vocabulary_, 1, probabilities);
    kernels.matmul(probabilities, Transpose::no, table_.value, Transpose::no,
                   mean.row_range(chunk.begin, chunk.end), false);
  });
  kernels.copy(tensor_parallel_.enter_backward(mean, rows).get(), part.gradient.row_range(0, here));
  const Tensor of_targets = rank_->activation({rows, C});
  kernels.embedding(targets, table_.value, first_id_, of_targets);
  kernels.copy(tensor_parallel_.enter_backward(of_targets, rows).get(),
               part.gradient.row_range(here, 2 * here));
  return part;
}

void VocabularyParallel::backward_weight(const Saved& saved, const Tensor& scale, const Tensor& targets,
                                         double gradient_scale) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = targets.numel();
  const Tensor x = tensor_parallel_.enter(saved.input, rows).get();
  const Tensor gradients = rank_->activation({std::min(rows, logits_chunk_rows), saved.exponentials.cols()});
  for_each_chunk(rows, [&](Range chunk) {
    const Tensor d_logits = gradients.row_range(0, chunk.size());
    kernels.cross_entropy_backward(
        saved.exponentials.row_range(chunk.begin, chunk.end), scale.flat_range(chunk.begin, chunk.end),
        targets.flat_range(chunk.begin, chunk.end), first_id_, scale_ * gradient_scale, d_logits);
    kernels.matmul(d_logits, Transpose::yes, x.row_range(chunk.begin, chunk.end), Transpose::no,
                   table_.gradient, true);
  });
}

// The loss (1, f64) of the sums (P, 3, N) of all parts.
Tensor VocabularyParallel::merged(const Tensor& sums, const Tensor& targets, const Tensor& scales,
                                  const Tensor& shares) const {
  const std::int64_t rows = targets.numel();
  const Tensor sum = rank_->statistic({rows}), target = rank_->statistic({rows});
  rank_->kernels().merge_softmax(sums, targets, bounds_, sum, target, scales, shares);
  const Tensor loss(rank_->arena(), MemoryCategory::other, DType::f64, {1});
  copy_from_host(std::vector<double>{0}, loss);
  rank_->kernels().add_losses(sum, target, targets, loss);
  return loss;
}

VocabularyParallel::Whole VocabularyParallel::merge(const std::vector<Part>& parts, const Tensor& targets,
                                                    double gradient_scale, const Tensor& loss_sum) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = targets.numel(), count = num_parts();
  const Range here = tensor_parallel_.rows_here(rows);
  const Tensor sums = rank_->statistic({3 * count * rows}), scales = rank_->statistic({count * rows}),
               shares = rank_->statistic({count * rows});
  for (std::int64_t p = 0; p < count; ++p)
    kernels.copy(parts[static_cast<std::size_t>(p)].sums, sums.flat_range(3 * p * rows, 3 * (p + 1) * rows));
  kernels.add_number(merged(sums, targets, scales, shares), loss_sum);
  Whole whole{rank_->activation({here.size(), parts.front().gradient.cols()}), {}};
  std::vector<Tensor> means, of_targets, of_parts;
  for (std::int64_t p = 0; p < count; ++p) {
    const Tensor& gradient = parts[static_cast<std::size_t>(p)].gradient;
    means.push_back(gradient.row_range(0, here.size()));
    of_targets.push_back(gradient.row_range(here.size(), 2 * here.size()));
    of_parts.push_back(shares.flat_range(p * rows + here.begin, p * rows + here.end));
    whole.scales.push_back(scales.flat_range(p * rows, (p + 1) * rows));
  }
  kernels.merge_gradients(means, of_parts, of_targets, targets.flat_range(here.begin, here.end),
                          scale_ * gradient_scale, whole.gradient);
  return whole;
}

Tensor VocabularyParallel::make_gradient(std::int64_t rows) const {
  return rank_->activation({2 * tensor_parallel_.rows_here(rows).size(), table_.value.cols()});
}

Tensor VocabularyParallel::loss(const Tensor& hidden, const Tensor& targets, int from) const {
  Communicator& group = rank_->along(Axis::pp);
  group.broadcast(hidden, from).wait();
  const std::int64_t rows = targets.numel(), count = num_parts();
  const Tensor x = tensor_parallel_.enter(hidden, rows).get(), sums = make_sums(rows);
  const Tensor buffer = rank_->statistic({std::min(rows, logits_chunk_rows), table_.value.rows()});
  for_each_chunk(rows, [&](Range chunk) {
    const Tensor logits = buffer.row_range(0, chunk.size());
    multiply(x.row_range(chunk.begin, chunk.end), logits);
    add_up(logits, targets, sums, chunk);
  });
  const Tensor all = rank_->statistic({3 * count * rows}), scales = rank_->statistic({count * rows}),
               shares = rank_->statistic({count * rows});
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(count), 3 * rows);
  group.all_gather(sums, all, counts).wait();
  return merged(all, targets, scales, shares);
}

Tensor VocabularyParallel::logits(const Tensor& hidden, int from) const {
  Communicator& group = rank_->along(Axis::pp);
  group.broadcast(hidden, from).wait();
  const Tensor mine = rank_->statistic({1, table_.value.rows()});
  multiply(hidden.row_range(hidden.rows() - 1, hidden.rows()), mine);
  // Of a part over tp, then of all parts.
  const int tp = rank_->size(Axis::tp), part = rank_->coordinate(Axis::pp);
  const auto size_of = [&](int p) {
    return bounds_[static_cast<std::size_t>(p) + 1] - bounds_[static_cast<std::size_t>(p)];
  };
  std::vector<std::int64_t> cut, parts;
  ParamSpec rows;
  rows.shape = {vocabulary_};
  rows.shard_dim = 0;
  rows.pieces = {{vocabulary_, 1}};
  rows.parts = num_parts();
  rows.part = part;
  for (int i = 0; i < tp; ++i) cut.push_back(local_ranges(rows, tp, i)[0].size());
  for (int p = 0; p < num_parts(); ++p) parts.push_back(size_of(p));
  const Tensor whole_part = rank_->statistic({size_of(part)}), all = rank_->statistic({1, vocabulary_});
  rank_->along(Axis::tp).all_gather(mine.flat(), whole_part, cut).wait();
  group.all_gather(whole_part, all.flat(), parts).wait();
  return all;
}

}  // namespace echelon
