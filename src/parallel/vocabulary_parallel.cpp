#include "parallel/vocabulary_parallel.h"

#include <algorithm>
#include <utility>

#include "spec/sum_blocks.h"
#include "tensor/host.h"
#include "tensor/sum_by_blocks.h"

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

VocabularyLogits logits_of_part(const Rank& rank, const ModelSpec& model, OutputWeights weights) {
  const ParamSpec part = part_of_matrix(model, rank.size(Axis::pp), rank.coordinate(Axis::pp));
  return {rank, model, part, std::move(weights),
          first_row(part, rank.size(Axis::tp), rank.coordinate(Axis::tp))};
}

}  // namespace

VocabularyParallel::VocabularyParallel(const Rank& rank, const Plan& plan, OutputWeights weights)
    : rank_(&rank),
      tensor_parallel_(rank, plan.sequence_parallel),
      logits_(logits_of_part(rank, plan.model, std::move(weights))) {
  const int parts = rank.size(Axis::pp);
  for (int part = 0; part < parts; ++part)
    bounds_.push_back(first_row(part_of_matrix(plan.model, parts, part), rank.size(Axis::tp), 0));
  bounds_.push_back(plan.model.vocab);
  if (plan.numerics == Numerics::ordinary) return;
  const ParamSpec matrix = output_matrix(plan.model);
  const Range here =
      split_range(num_sum_blocks({matrix}), parts * tensor_parallel_.size(),
                  rank.coordinate(Axis::pp) * tensor_parallel_.size() + tensor_parallel_.index());
  blocks_.emplace(rank, matrix, logits_.table().value, here);
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
  if (blocks_) return forward_blocks(x, targets, saved.exponentials);
  Part part{make_gradient(rows), make_sums(rows)};
  const std::int64_t here = hidden.rows();
  // By probabilities, then the targets' rows: sums over the tp group.
  const Tensor mean = rank_->activation({rows, C}),
               gradients = rank_->activation({logits_rows_at_once(*rank_, rows), width});
  for_each_logits_chunk(*rank_, rows, [&](Range chunk) {
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
                                         double gradient_scale, const SequenceSums& sums) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = targets.numel();
  const Tensor x = tensor_parallel_.enter(saved.input, rows).get();
  const Tensor gradients = rank_->activation({logits_rows_at_once(*rank_, rows), saved.exponentials.cols()});
  const double factor = logits_.scale() * gradient_scale;
  sums.add(logits_.weights().trained(), [&](Range run, std::span<const Tensor> d_weights, bool onto) {
    for_each_logits_chunk(*rank_, run.size(), [&](Range of_run) {
      const Range chunk{run.begin + of_run.begin, run.begin + of_run.end};
      const Tensor d_logits = gradients.row_range(0, chunk.size()),
                   exponentials = saved.exponentials.row_range(chunk.begin, chunk.end),
                   of_chunk = targets.flat_range(chunk.begin, chunk.end);
      if (blocks_)
        blocks_->make_gradients(exponentials, scale, of_chunk, factor, d_logits, chunk.begin);
      else
        kernels.cross_entropy_backward(exponentials, scale.flat_range(chunk.begin, chunk.end), of_chunk,
                                       logits_.first_id(), factor, d_logits);
      logits_.add_weight_gradients(d_logits, x.row_range(chunk.begin, chunk.end), d_weights,
                                   onto || of_run.begin > 0);
    });
  });
}

// What is here of this part of the vocabulary, of all rows.
VocabularyParallel::Part VocabularyParallel::forward_blocks(const Tensor& x, const Tensor& targets,
                                                            const Tensor& exponentials) const {
  const std::int64_t rows = targets.numel(), C = x.cols();
  Kernels& kernels = rank_->kernels();
  logits_.multiply(x, exponentials);
  Part part{make_gradient(rows), sums_of_part(exponentials, targets)};
  for_each_logits_chunk(*rank_, rows, [&](Range chunk) {
    const Tensor rounded = blocks_->rounded(exponentials.row_range(chunk.begin, chunk.end));
    for (std::int64_t b = 0; b < blocks_->count(); ++b)
      blocks_->multiply(b, rounded, part.gradient.row_range(b * rows + chunk.begin, b * rows + chunk.end));
  });
  const Tensor of_targets = rank_->activation({rows, C});
  kernels.embedding(targets, logits_.table().value, logits_.first_id(), of_targets);
  kernels.copy(of_targets, part.gradient.row_range(blocks_->count() * rows, (blocks_->count() + 1) * rows));
  return part;
}

// Of the blocks of all tp ranks.
Tensor VocabularyParallel::sums_of_part(const Tensor& exponentials, const Tensor& targets) const {
  const Tensor here = blocks_->add_up(exponentials, targets);
  if (tensor_parallel_.size() == 1) return here;
  const Tensor all = make_sums(targets.numel());
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(tensor_parallel_.size()), here.numel());
  rank_->along(Axis::tp).all_gather(here, all, counts).wait();
  return all;
}

// As the output layer does on a single pipeline rank: chunk by chunk of a run, each summed separately before
// it is added.
void VocabularyParallel::add_losses(const SoftmaxBlocks::Whole& whole, const Tensor& targets, Range run,
                                    const Tensor& loss_sum) const {
  for_each_logits_chunk(*rank_, run.size(), [&](Range chunk) {
    const auto of = [&](const Tensor& x) {
      return x.flat_range(run.begin + chunk.begin, run.begin + chunk.end);
    };
    rank_->kernels().add_losses(of(whole.sum), of(whole.target), of(targets), loss_sum);
  });
}

VocabularyParallel::Whole VocabularyParallel::merge_blocks(const std::vector<Part>& parts,
                                                           const Tensor& targets, double gradient_scale,
                                                           const Tensor& loss_sum,
                                                           const std::vector<Range>& runs) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = targets.numel(), each = blocks_->count(),
                     of_part = each * tensor_parallel_.size();
  const Tensor sums = rank_->statistic({3 * blocks_->all() * rows});
  for (std::int64_t p = 0; p < num_parts(); ++p)
    kernels.copy(parts[static_cast<std::size_t>(p)].sums,
                 sums.flat_range(3 * p * of_part * rows, 3 * (p + 1) * of_part * rows));
  const SoftmaxBlocks::Whole merged = blocks_->merge(sums, targets);
  for (std::size_t run = 0; run < runs.size(); ++run) {
    const Tensor loss = logits_.make_loss();
    add_losses(merged, targets, runs[run], loss);
    const auto place = static_cast<std::int64_t>(run);
    kernels.add_number(loss, loss_sum.flat_range(place, place + 1));
  }
  Whole whole;
  const std::vector<std::int64_t> shape{rows, logits_.table().value.cols()};
  const Tensor sum = rank_->statistic({tensor_parallel_.rows_here(rows).size(), shape.back()});
  sum_by_blocks(
      kernels, num_parts(), sum, [&] { return rank_->statistic(sum.shape()); },
      [&](std::int64_t p, const Tensor& to) {
        const Tensor& gradient = parts[static_cast<std::size_t>(p)].gradient;
        const std::int64_t first = p * of_part + tensor_parallel_.index() * each;
        whole.scales.push_back(merged.scales.flat_range(first * rows, (first + each) * rows));
        const auto room = [&] { return rank_->statistic(shape); };
        const Tensor here = room();
        sum_by_blocks(kernels, each, here, room, [&](std::int64_t b, const Tensor& term) {
          blocks_->make_term(gradient.row_range(b * rows, (b + 1) * rows),
                             whole.scales.back().flat_range(b * rows, (b + 1) * rows),
                             rows_of_targets(gradient.row_range(each * rows, (each + 1) * rows), targets,
                                             blocks_->ids(first + b)),
                             targets, logits_.scale() * gradient_scale, term);
        });
        kernels.copy(tensor_parallel_.enter_backward(here, rows).get(), to);
      });
  whole.gradient = rank_->activation(sum.shape());
  kernels.copy(sum, whole.gradient);
  return whole;
}

// Those of targets in one block.
Tensor VocabularyParallel::rows_of_targets(const Tensor& of_part, const Tensor& targets, Range ids) const {
  if (blocks_->count() == 1) return of_part;
  std::vector<std::int32_t> places = copy_to_host<std::int32_t>(targets, -1);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const bool is_here = places[i] >= ids.begin && places[i] < ids.end;
    places[i] = is_here ? static_cast<std::int32_t>(i) : -1;
  }
  const Tensor rows(rank_->arena(), MemoryCategory::activations, DType::i32, targets.shape());
  copy_from_host(places, rows);
  const Tensor found = rank_->statistic(of_part.shape());
  rank_->kernels().embedding(rows, of_part, 0, found);
  return found;
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
                                                    double gradient_scale, const Tensor& loss_sum,
                                                    const std::vector<Range>& runs) const {
  if (blocks_) return merge_blocks(parts, targets, gradient_scale, loss_sum, runs);
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
  if (blocks_) return rank_->statistic({(blocks_->count() + 1) * rows, logits_.table().value.cols()});
  return rank_->activation({2 * tensor_parallel_.rows_here(rows).size(), logits_.table().value.cols()});
}

Tensor VocabularyParallel::loss(const Tensor& hidden, const Tensor& targets, int from,
                                const std::vector<Range>& runs) const {
  Communicator& group = rank_->along(Axis::pp);
  group.broadcast(hidden, from).wait();
  const std::int64_t rows = targets.numel(), count = num_parts();
  const Tensor x = tensor_parallel_.enter(hidden, rows).get();
  const auto gathered = [&](const Tensor& of_part) {
    const Tensor all = rank_->statistic({count * of_part.numel()});
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(count), of_part.numel());
    group.all_gather(of_part, all, counts).wait();
    return all;
  };
  if (blocks_) {
    const Tensor logits = rank_->statistic({rows, logits_.table().value.rows()}), loss = logits_.make_loss();
    logits_.multiply(x, logits);
    const SoftmaxBlocks::Whole whole = blocks_->merge(gathered(sums_of_part(logits, targets)), targets);
    for (const Range& run : runs) add_losses(whole, targets, run, loss);
    return loss;
  }
  const Tensor sums = make_sums(rows);
  const Tensor buffer = logits_.make_chunk(rows);
  for_each_logits_chunk(*rank_, rows, [&](Range chunk) {
    const Tensor logits = buffer.row_range(0, chunk.size());
    logits_.multiply(x.row_range(chunk.begin, chunk.end), logits);
    add_up(logits, targets, sums, chunk);
  });
  const Tensor all = gathered(sums), scales = rank_->statistic({count * rows}),
               shares = rank_->statistic({count * rows});
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
