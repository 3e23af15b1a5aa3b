// The output layer's product with cross-entropy. A chunk's gradient takes the place of its logits, so nothing
// is computed twice: the backward pass makes the loss as well.
#include <span>
#include <vector>

#include "model/op.h"
#include "parallel/vocabulary_logits.h"
#include "parallel/whole_rows.h"
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
                    : sum_blocks({op.weights.front()}, s.tensor_parallel.size(), s.tensor_parallel.index())),
        whole_rows_(s.rank, s.plan),
        cuts_sequences_(s.plan.numerics == Numerics::invariant && s.rank.size(Axis::cp) > 1) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take_input(op());
    run.set(out(), run.microbatch().targets.defined()
                       ? loss(run, x)
                                     : logits_.gathered(x.row_range(x.rows() - 1, x.rows())));
  }

  void run_backward(BlockRun& run) const override {
    run.set_gradient(in(),
                     run.rounded(run.tensor_parallel().enter_backward(add_loss(run), run.rows()).get()));
  }

 private:
  // Rows and their targets. Where context parallelism cuts sequences whose losses are summed in order, one
  // rank has all of them, and sums; the others have their own.
  struct Given {
    Tensor x, targets;
    bool sums = true;
  };
  Given given(const BlockRun& run, const Tensor& x) const {
    Given own{x, run.microbatch().targets};
    if (!cuts_sequences_) return own;
    const std::int64_t rows = x.rows() * run.rank().size(Axis::cp);
    const auto bring = [&](const Tensor& here) { return whole_rows_.bring(here, rows, logits_.table()); };
    Given all{bring(x), bring(own.targets)};
    if (all.x.defined()) return all;
    own.sums = false;
    return own;
  }

  Tensor loss(const BlockRun& run, const Tensor& here) const {
    const Tensor loss_sum = logits_.make_loss();
    const auto [x, targets, sums] = given(run, here);
    if (!sums) return loss_sum;
    const Tensor buffer = make_chunk(run.sums().runs().front());
    for (const Range& rows : run.sums().runs())
      each_chunk(rows, [&, &x = x, &targets = targets](Range chunk) {
        const Tensor logits = buffer.row_range(0, chunk.size());
        logits_.multiply(x.row_range(chunk.begin, chunk.end), logits);
        add_losses(run, logits, targets.flat_range(chunk.begin, chunk.end), loss_sum);
      });
    return loss_sum;
  }

  // Adds to the losses and to the table's gradient; returns the partial gradient (N, C) of the input.
  Tensor add_loss(BlockRun& run) const {
    const Weight& table = logits_.table();
    const Given given = this->given(run, run.take_kept_input(op()));
    const Tensor& x = given.x;
    const Tensor dx = run.partial_sum({x.rows(), x.cols()});
    const std::vector<Range> runs = given.sums ? run.sums().runs() : std::vector<Range>{{0, x.rows()}};
    const Tensor buffer = make_chunk(runs.front());
    // The gradient takes the logits' place where it is as wide as they.
    const PrecisionRecipe& precision = run.rank().precision();
    const Tensor gradients =
        precision.statistics == precision.activations ? buffer : run.activation(buffer.shape());
    const auto take = [&](Range rows, std::span<const Tensor> of_table, bool onto) {
      add_loss_of(run, rows, given, {buffer, gradients}, dx, of_table.empty() ? Tensor() : of_table[0], onto);
    };
    const Weight* const one[] = {&table};
    if (table.gradient.defined() && given.sums)
      run.sums().add(one, take);
    else
      for (const Range& rows : runs) take(rows, {}, true);
    if (given.sums) return cuts_sequences_ ? whole_rows_.here(dx) : dx;
    if (table.gradient.defined()) run.kernels().fill(table.gradient, -0.0);  // as SequenceSums::bring() does
    return dx;
  }

  struct Buffers {
    Tensor logits, gradients;  // of a chunk
  };
  // Of these rows, which are all, or a sequence.
  void add_loss_of(const BlockRun& run, Range rows, const Given& given, const Buffers& buffers,
                   const Tensor& dx, const Tensor& d_table, bool onto) const {
    Kernels& kernels = run.kernels();
    const Weight& table = logits_.table();
    const Tensor loss_sum = logits_.make_loss();
    const double gradient_scale = logits_.scale() * run.loss().gradient_scale;
    each_chunk(rows, [&](Range range) {
      const Tensor logits = buffers.logits.row_range(0, range.size()),
                   d_logits = buffers.gradients.row_range(0, range.size()),
                   chunk = given.x.row_range(range.begin, range.end),
                   targets = given.targets.flat_range(range.begin, range.end);
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
    if (!given.sums) return;
    const std::int64_t place = rows.begin == 0 ? 0 : rows.begin / rows.size();
    kernels.add_number(loss_sum, run.loss().sum.flat_range(place, place + 1));
  }

  Tensor make_chunk(Range rows) const { return logits_.make_chunk(rows.size()); }
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
  WholeRows whole_rows_;
  bool cuts_sequences_;
};

}  // namespace

std::unique_ptr<OpRunner> make_loss_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<LossOp>(op, s);
}

}  // namespace echelon
