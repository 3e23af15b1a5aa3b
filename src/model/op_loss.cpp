// The output layer's product with cross-entropy, cut by vocabulary (Megatron-LM,
// https://arxiv.org/abs/1909.08053, section 3): logits are never gathered. Per token the maximum, then the
// sum of exponentials and the target's logit are all that travels: 3 numbers instead of V. Logits live for
// one chunk of tokens at a time, and their gradient takes their place, so the (N, V) matrix is never stored
// and never computed twice: the backward pass makes the loss as well.
#include <algorithm>
#include <vector>

#include "model/op.h"
#include "spec/plan.h"
#include "tensor/host.h"

namespace echelon {
namespace {

// Every tp rank walks the same chunks, since all hold the whole rows here.
template <class Visit>
void for_each_chunk(std::int64_t rows, const Visit& visit) {
  for (std::int64_t begin = 0; begin < rows; begin += logits_chunk_rows)
    visit(begin, std::min(begin + logits_chunk_rows, rows));
}

Tensor no_loss(const Rank& rank) {
  const Tensor loss(rank.arena(), MemoryCategory::other, DType::f64, {1});
  copy_from_host(std::vector<double>{0}, loss);
  return loss;
}

class LossOp final : public OpRunner {
 public:
  LossOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        table_(s.parameters.output_weight()),
        first_id_(first_id_here(op.weights.front(), s)),
        scale_(1 / s.plan.model.scales.logits_divisor),
        cap_(s.plan.model.caps.logits) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take_input(op()), targets = run.microbatch().targets;
    run.set(out(),
            targets.defined() ? loss(run, x, targets) : logits(run, x.row_range(x.rows() - 1, x.rows())));
  }

  void run_backward(BlockRun& run) const override {
    run.set_gradient(in(), run.tensor_parallel().enter_backward(add_loss(run), run.rows()).get());
  }

 private:
  Tensor room_for_logits(const BlockRun& run) const {
    return run.statistic({std::min(run.rows(), logits_chunk_rows), table_.value.rows()});
  }

  Tensor logits(const BlockRun& run, const Tensor& x) const {
    const Tensor logits = run.statistic({x.rows(), table_.value.rows()});
    multiply(run, x, logits);
    return logits;
  }

  Tensor loss(const BlockRun& run, const Tensor& x, const Tensor& targets) const {
    const Tensor loss_sum = no_loss(run.rank()), buffer = room_for_logits(run);
    for_each_chunk(run.rows(), [&](std::int64_t begin, std::int64_t end) {
      const Tensor logits = buffer.row_range(0, end - begin);
      multiply(run, x.row_range(begin, end), logits);
      softmax_sums(run, logits, targets.flat_range(begin, end), loss_sum);
    });
    return loss_sum;
  }

  // Adds to the loss and to the table's gradient; returns the partial gradient (N, C) of the input.
  Tensor add_loss(BlockRun& run) const {
    Kernels& kernels = run.kernels();
    const Tensor x = run.take_kept_input(op()), loss_sum = no_loss(run.rank());
    Tensor dx = run.activation({x.rows(), x.cols()});
    const Tensor buffer = room_for_logits(run);
    // The gradient takes the logits' place where it is as wide as they.
    const PrecisionRecipe& precision = run.rank().precision();
    const Tensor gradients =
        precision.statistics == precision.activations ? buffer : run.activation(buffer.shape());
    for_each_chunk(run.rows(), [&](std::int64_t begin, std::int64_t end) {
      const Tensor logits = buffer.row_range(0, end - begin), d_logits = gradients.row_range(0, end - begin),
                   chunk = x.row_range(begin, end), targets = run.microbatch().targets.flat_range(begin, end);
      multiply(run, chunk, logits);
      const SoftmaxSums sums = softmax_sums(run, logits, targets, loss_sum);
      kernels.cross_entropy_backward(logits, sums.sum, targets, first_id_, scale_ * run.loss().gradient_scale,
                                     d_logits, {cap_, sums.max});
      kernels.matmul(d_logits, Transpose::no, table_.value, Transpose::no, dx.row_range(begin, end), false);
      if (table_.gradient.defined())
        kernels.matmul(d_logits, Transpose::yes, chunk, Transpose::no, table_.gradient, true);
    });
    kernels.add_number(loss_sum, run.loss().sum);
    return dx;
  }

  struct SoftmaxSums {
    Tensor max, sum;  // global ones, of each row
  };
  // Leaves exp(logits - max) in `logits` and their sums in what is returned; adds to loss_sum.
  SoftmaxSums softmax_sums(const BlockRun& run, const Tensor& logits, const Tensor& targets,
                           const Tensor& loss_sum) const {
    const std::int64_t rows = logits.rows();
    Communicator& group = run.rank().along(Axis::tp);
    const Tensor max = run.statistic({rows});
    run.kernels().row_max(logits, max);
    group.all_reduce(max, ReduceOp::max).wait();
    // Sum and target's logit side by side, so that one all_reduce carries both.
    const Tensor sum_and_target = run.statistic({2 * rows});
    const Tensor sum = sum_and_target.flat_range(0, rows), target = sum_and_target.flat_range(rows, 2 * rows);
    run.kernels().exp_sum(logits, max, targets, first_id_, sum, target);
    group.all_reduce(sum_and_target).wait();
    run.kernels().add_losses(sum, target, targets, loss_sum);
    return {max, sum};
  }

  void multiply(const BlockRun& run, const Tensor& x, const Tensor& logits) const {
    run.kernels().matmul(x, Transpose::no, table_.value, Transpose::yes, logits, false);
    if (scale_ != 1) run.kernels().scale(logits, scale_);
    if (cap_ > 0) run.kernels().soft_cap(logits, cap_);
  }

  Weight table_;  // (V_local, C): vocabulary rows from first_id_ on
  std::int64_t first_id_;
  double scale_, cap_;  // of the logits
};

}  // namespace

std::unique_ptr<OpRunner> make_loss_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<LossOp>(op, s);
}

}  // namespace echelon
