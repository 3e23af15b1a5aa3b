#include "parallel/vocabulary_parallel.h"

#include <algorithm>
#include <utility>

namespace echelon {
namespace {

// The part of the output matrix that a pipeline rank has.
ParamSpec part_of_matrix(const ModelSpec& model, int parts, int part) {
  ParamSpec matrix = output_matrix(model);
  matrix.parts = parts;
  matrix.part = part;
  return matrix;
}

std::int64_t first_row(const ParamSpec& part, int tp, int index) {
  return local_ranges(part, tp, index)[0].begin;
}

VocabularyLogits logits_of_part(const Rank& rank, const ModelSpec& model, Weight table) {
  const ParamSpec part = part_of_matrix(model, rank.size(Axis::pp), rank.coordinate(Axis::pp));
  return {rank, model, part, std::move(table),
          first_row(part, rank.size(Axis::tp), rank.coordinate(Axis::tp))};
}

}  // namespace

VocabularyParallel::VocabularyParallel(const Rank& rank, const Plan& plan, Weight table)
    : rank_(&rank),
      tensor_parallel_(rank, plan.sequence_parallel),
      logits_(logits_of_part(rank, plan.model, std::move(table))) {
  const int parts = rank.size(Axis::pp);
  for (int part = 0; part < parts; ++part)
    bounds_.push_back(first_row(part_of_matrix(plan.model, parts, part), rank.size(Axis::tp), 0));
  bounds_.push_back(plan.model.vocab);
}

void VocabularyParallel::add_up(const Tensor& logits, const Tensor& targets, const Tensor& sums,
                                Range chunk) const {
  const std::int64_t rows = sums.numel() / 3;
  const auto [max, sum, target] = logits_.exponentials(logits, targets.flat_range(chunk.begin, chunk.end));
  std::int64_t which = 0;
  for (const Tensor* numbers : {&max, &sum, &target}) {
    const std::int64_t begin = rows * which++;
    rank_->kernels().copy(*numbers, sums.flat_range(begin + chunk.begin, begin + chunk.end));
  }
}

VocabularyParallel::Part VocabularyParallel::forward(const Tensor& hidden, const Tensor& targets,
                                                     Saved& saved) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = targets.numel(), width = logits_.table().value.rows(), C = hidden.cols();
  const Tensor x = tensor_parallel_.enter(hidden, rows).get();
  saved = {hidden, rank_->statistic({rows, width})};
  Part part{make_gradient(rows), make_sums(rows)};
  const std::int64_t here = hidden.rows();
  // By probabilities, then the targets' rows: sums over the tp group.
  const Tensor mean = rank_->activation({rows, C}),
               gradients = rank_->activation({std::min(rows, logits_chunk_rows), width});
  for_each_logits_chunk(rows, [&](Range chunk) {
    const Tensor logits = saved.exponentials.row_range(chunk.begin, chunk.end),
                 probabilities = gradients.row_range(0, chunk.size());
    logits_.multiply(x.row_range(chunk.begin, chunk.end), logits);
    add_up(logits, targets, part.sums, chunk);
    // As if no target were here.
    kernels.cross_entropy_backward(logits, part.sums.flat_range(rows + chunk.begin, rows + chunk.end),
                                   targets.flat_range(chunk.begin, chunk.end), bounds_.back(), 1,
                                   probabilities);
    kernels.matmul(probabilities, Transpose::no, logits_.table().value, Transpose::no,
                   mean.row_range(chunk.begin, chunk.end), false);
  });
  kernels.copy(tensor_parallel_.enter_backward(mean, rows).get(), part.gradient.row_range(0, here));
  const Tensor of_targets = rank_->activation({rows, C});
  kernels.embedding(targets, logits_.table().value, logits_.first_id(), of_targets);
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
  for_each_logits_chunk(rows, [&](Range chunk) {
    const Tensor d_logits = gradients.row_range(0, chunk.size());
    kernels.cross_entropy_backward(saved.exponentials.row_range(chunk.begin, chunk.end),
                                   scale.flat_range(chunk.begin, chunk.end),
                                   targets.flat_range(chunk.begin, chunk.end), logits_.first_id(),
                                   logits_.scale() * gradient_scale, d_logits);
    kernels.matmul(d_logits, Transpose::yes, x.row_range(chunk.begin, chunk.end), Transpose::no,
                   logits_.table().gradient, true);
  });
}

// The loss (1, f64) of the sums (P, 3, N) of all parts.
Tensor VocabularyParallel::merged(const Tensor& sums, const Tensor& targets, const Tensor& scales,
                                  const Tensor& shares) const {
  const std::int64_t rows = targets.numel();
  const Tensor sum = rank_->statistic({rows}), target = rank_->statistic({rows});
  rank_->kernels().merge_softmax(sums, targets, bounds_, sum, target, scales, shares);
  const Tensor loss = logits_.make_loss();
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
                          logits_.scale() * gradient_scale, whole.gradient);
  return whole;
}

Tensor VocabularyParallel::make_gradient(std::int64_t rows) const {
  return rank_->activation({2 * tensor_parallel_.rows_here(rows).size(), logits_.table().value.cols()});
}

Tensor VocabularyParallel::loss(const Tensor& hidden, const Tensor& targets, int from) const {
  Communicator& group = rank_->along(Axis::pp);
  group.broadcast(hidden, from).wait();
  const std::int64_t rows = targets.numel(), count = num_parts();
  const Tensor x = tensor_parallel_.enter(hidden, rows).get(), sums = make_sums(rows);
  const Tensor buffer = logits_.make_chunk(rows);
  for_each_logits_chunk(rows, [&](Range chunk) {
    const Tensor logits = buffer.row_range(0, chunk.size());
    logits_.multiply(x.row_range(chunk.begin, chunk.end), logits);
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
  const Tensor part = logits_.gathered(hidden.row_range(hidden.rows() - 1, hidden.rows()));
  std::vector<std::int64_t> parts;
  for (std::size_t p = 1; p < bounds_.size(); ++p) parts.push_back(bounds_[p] - bounds_[p - 1]);
  const Tensor all = rank_->statistic({1, bounds_.back()});
  group.all_gather(part.flat(), all.flat(), parts).wait();
  return all;
}

}  // namespace echelon
