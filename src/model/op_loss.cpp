// The output layer's product with cross-entropy. A chunk's gradient takes the place of its logits, so nothing
// is computed twice: the backward pass makes the loss as well.
#include <span>

#include "model/op.h"
#include "parallel/vocabulary_logits.h"
#include "spec/sum_blocks.h"

namespace echelon {
namespace {

class LossOp final : public OpRunner {
 public:
  LossOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        logits_(s.rank, s.plan.model, op.weights.front(), s.parameters.output_weight(),
                first_id_here(op.weights.front(), s),
                s.plan.numerics == Numerics::ordinary
                    ? SumBlocks()
                    : sum_blocks({op.weights.front()}, s.tensor_parallel.size(), s.tensor_parallel.index())) {
  }

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take_input(op()), targets = run.microbatch().targets;
    run.set(out(), targets.defined() ? loss(run, x, targets)
                                     : logits_.gathered(x.row_range(x.rows() - 1, x.rows())));
  }

  void run_backward(BlockRun& run) const override {
    run.set_gradient(in(), run.tensor_parallel().enter_backward(add_loss(run), run.rows()).get());
  }

 private:
  Tensor loss(const BlockRun& run, const Tensor& x, const Tensor& targets) const {
    const Tensor loss_sum = logits_.make_loss(), buffer = make_chunk(run);
    for (const Range& rows : run.sums().runs())
      each_chunk(rows, [&](Range chunk) {
        const Tensor logits = buffer.row_range(0, chunk.size());
        logits_.multiply(x.row_range(chunk.begin, chunk.end), logits);
        add_losses(run, logits, targets.flat_range(chunk.begin, chunk.end), loss_sum);
      });
    return loss_sum;
  }

  // Adds to the losses and to the table's gradient; returns the partial gradient (N, C) of the input.
  Tensor add_loss(BlockRun& run) const {
    const Weight& table = logits_.table();
    const Tensor x = run.take_kept_input(op());
    Tensor dx = run.activation({x.rows(), x.cols()});
    const Tensor buffer = make_chunk(run);
    // The gradient takes the logits' place where it is as wide as they.
    const PrecisionRecipe& precision = run.rank().precision();
    const Tensor gradients =
        precision.statistics == precision.activations ? buffer : run.activation(buffer.shape());
    const auto take = [&](Range rows, std::span<const Tensor> of_table, bool onto) {
      add_loss_of(run, rows, x, {buffer, gradients}, dx, of_table.empty() ? Tensor() : of_table[0], onto);
    };
    const Weight* const one[] = {&table};
    if (table.gradient.defined())
      run.sums().add(one, take);
    else
      for (const Range& rows : run.sums().runs()) take(rows, {}, true);
    return dx;
  }

  struct Buffers {
    Tensor logits, gradients;  // of a chunk
  };
  // Of these rows, which are all, or a sequence.
  void add_loss_of(const BlockRun& run, Range rows, const Tensor& x, const Buffers& buffers, const Tensor& dx,
                   const Tensor& d_table, bool onto) const {
    Kernels& kernels = run.kernels();
    const Weight& table = logits_.table();
    const Tensor loss_sum = logits_.make_loss();
    const double gradient_scale = logits_.scale() * run.loss().gradient_scale;
    each_chunk(rows, [&](Range range) {
      const Tensor logits = buffers.logits.row_range(0, range.size()),
                   d_logits = buffers.gradients.row_range(0, range.size()),
                   chunk = x.row_range(range.begin, range.end),
                   targets = run.microbatch().targets.flat_range(range.begin, range.end);
      logits_.multiply(chunk, logits);
      const VocabularyLogits::Sums sums = add_losses(run, logits, targets, loss_sum);
      kernels.cross_entropy_backward(logits, sums.sum, targets, logits_.first_id(), gradient_scale, d_logits,
                                     {logits_.cap(), sums.max});
      kernels.matmul(d_logits, Transpose::no, table.value, Transpose::no,
                     dx.row_range(range.begin, range.end), false, logits_.blocks());
      if (d_table.defined())
        kernels.matmul(d_logits, Transpose::yes, chunk, Transpose::no, d_table,
                       onto || range.begin > rows.begin);
    });
    const std::int64_t place = rows.begin == 0 ? 0 : rows.begin / rows.size();
    kernels.add_number(loss_sum, run.loss().sum.flat_range(place, place + 1));
  }

  Tensor make_chunk(const BlockRun& run) const {
    return logits_.make_chunk(run.sums().runs().front().size());
  }
  template <class Visit>
  static void each_chunk(Range rows, const Visit& visit) {
    for_each_logits_chunk(rows.size(), [&](Range chunk) {
      visit(Range{rows.begin + chunk.begin, rows.begin + chunk.end});
    });
  }

  // Leaves the exponentials in `logits`.
  VocabularyLogits::Sums add_losses(const BlockRun& run, const Tensor& logits, const Tensor& targets,
                                    const Tensor& loss_sum) const {
    VocabularyLogits::Sums sums = logits_.exponentials(logits, targets);
    run.kernels().add_losses(sums.sum, sums.target, targets, loss_sum);
    return sums;
  }

  VocabularyLogits logits_;
};

}  // namespace

std::unique_ptr<OpRunner> make_loss_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<LossOp>(op, s);
}

}  // namespace echelon
