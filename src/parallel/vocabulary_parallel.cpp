#include "parallel/vocabulary_parallel.h"

#include <algorithm>
#include <vector>

#include "tensor/host.h"

namespace echelon {

Tensor VocabularyEmbedding::forward(const Tensor& ids) const {
  const std::int64_t rows = ids.numel();
  const Tensor y = rank_->activation({rows, table_.value.cols()});
  rank_->kernels().embedding(ids, table_.value, first_id_, y);
  return y;
}

void VocabularyEmbedding::backward(const Tensor& ids, const Tensor& dy) const {
  const Tensor whole = tensor_parallel_.leave_backward(dy, ids.numel()).get();
  rank_->kernels().embedding_backward(ids, whole, first_id_, table_.gradient);
}

OutputHead::Normed OutputHead::norm(const Tensor& x, std::int64_t rows) const {
  const Tensor stats = rank_->statistic({x.rows(), norm_.stats_width()});
  const Tensor y = rank_->activation({x.rows(), x.cols()});
  norm_.forward(rank_->kernels(), x, y, stats);
  return {stats, tensor_parallel_.enter(y, rows).get()};
}

// Chunks of tokens: every tp rank walks the same ones, since all hold the whole rows here.
template <class Visit>
static void for_each_chunk(std::int64_t rows, const Visit& visit) {
  for (std::int64_t begin = 0; begin < rows; begin += logits_chunk_rows)
    visit(begin, std::min(begin + logits_chunk_rows, rows));
}

Tensor OutputHead::no_loss() const {
  const Tensor loss(rank_->arena(), MemoryCategory::other, DType::f64, {1});
  copy_from_host(std::vector<double>{0}, loss);
  return loss;
}

Tensor OutputHead::softmax_sums(const Tensor& logits, const Tensor& targets, const Tensor& loss_sum) const {
  const std::int64_t rows = logits.rows();
  Communicator& group = rank_->along(Axis::tp);
  const Tensor max = rank_->statistic({rows});
  rank_->kernels().row_max(logits, max);
  group.all_reduce(max, ReduceOp::max).wait();
  // Sum and target's logit side by side, so that one all_reduce carries both.
  const Tensor sum_and_target = rank_->statistic({2 * rows});
  const Tensor sum = sum_and_target.flat_range(0, rows), target = sum_and_target.flat_range(rows, 2 * rows);
  rank_->kernels().exp_sum(logits, max, targets, first_id_, sum, target);
  group.all_reduce(sum_and_target).wait();
  rank_->kernels().add_losses(sum, target, targets, loss_sum);
  return sum;
}

OutputHead::Result OutputHead::loss_and_gradient(const Tensor& x, const Tensor& targets,
                                                 double gradient_scale) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = targets.numel(), width = x.cols(), vocab = table_.value.rows();
  const Tensor loss_sum = no_loss();
  Tensor dx = rank_->activation({x.rows(), width});
  Normed normed = norm(x, rows);
  Tensor d_whole = rank_->activation({rows, width});
  {
    const std::vector<std::int64_t> shape{std::min(rows, logits_chunk_rows), vocab};
    const Tensor buffer = rank_->statistic(shape);
    // The gradient takes the logits' place where it is as wide as they.
    const PrecisionRecipe& precision = rank_->precision();
    const Tensor gradients =
        precision.statistics == precision.activations ? buffer : rank_->activation(shape);
    for_each_chunk(rows, [&](std::int64_t begin, std::int64_t end) {
      const Tensor logits = buffer.row_range(0, end - begin), d_logits = gradients.row_range(0, end - begin),
                   chunk = normed.whole.row_range(begin, end);
      const Tensor chunk_targets = targets.flat_range(begin, end);
      kernels.matmul(chunk, Transpose::no, table_.value, Transpose::yes, logits, false);
      const Tensor sum = softmax_sums(logits, chunk_targets, loss_sum);
      kernels.cross_entropy_backward(logits, sum, chunk_targets, first_id_, gradient_scale, d_logits);
      kernels.matmul(d_logits, Transpose::no, table_.value, Transpose::no, d_whole.row_range(begin, end),
                     false);
      kernels.matmul(d_logits, Transpose::yes, chunk, Transpose::no, table_.gradient, true);
    });
  }
  normed.whole = Tensor();
  const Tensor dy = tensor_parallel_.enter_backward(std::move(d_whole), rows).get();
  kernels.fill(dx, 0.0);
  norm_.backward_weight(kernels, dy, x, normed.stats);
  norm_.backward_input(kernels, dy, x, normed.stats, dx);
  return {loss_sum, dx};
}

double OutputHead::loss(const Tensor& x, const Tensor& targets) const {
  const std::int64_t rows = targets.numel();
  const Tensor loss_sum = no_loss();
  const Normed normed = norm(x, rows);
  const Tensor buffer = rank_->statistic({std::min(rows, logits_chunk_rows), table_.value.rows()});
  for_each_chunk(rows, [&](std::int64_t begin, std::int64_t end) {
    const Tensor logits = buffer.row_range(0, end - begin);
    rank_->kernels().matmul(normed.whole.row_range(begin, end), Transpose::no, table_.value, Transpose::yes,
                            logits, false);
    softmax_sums(logits, targets.flat_range(begin, end), loss_sum);
  });
  return copy_to_host(loss_sum, 0.0).front();
}

Tensor OutputHead::logits(const Tensor& x, std::int64_t rows) const {
  const Normed normed = norm(x.row_range(x.rows() - rows, x.rows()), rows);
  const Tensor logits = rank_->statistic({rows, table_.value.rows()});
  rank_->kernels().matmul(normed.whole, Transpose::no, table_.value, Transpose::yes, logits, false);
  return logits;
}

}  // namespace echelon
