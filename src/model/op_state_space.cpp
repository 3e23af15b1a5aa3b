// Mamba-2's convolution and scan (Dao & Gu 2024, https://arxiv.org/abs/2405.21060), on the heads of this tp
// rank, from each document's first token on. What is kept is what they are given: the backward pass makes the
// convolution and the states again, beside its gradients.
#include <algorithm>

#include "model/op.h"

namespace echelon {

StateSpaceShape state_space_here(const Plan& plan) {
  const StateSpaceSpec& s = plan.model.state_space;
  const int tp = plan.mesh.size(Axis::tp);
  return {.heads = s.heads / tp,
          .head_dim = s.head_dim,
          .groups = std::max<std::int64_t>(s.groups / tp, 1),
          .state = s.state,
          .chunk = s.chunk};
}

namespace {

class StateSpaceOp final : public OpRunner {
 public:
  StateSpaceOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        shape_(state_space_here(s.plan)),
        taps_(s.stacked(op.weights)),
        dt_bias_(s.stacked({*(op.biases.end() - 3)})),
        a_log_(s.stacked({*(op.biases.end() - 2)})),
        d_(s.stacked({op.biases.back()})) {
    if (op.biases.size() > 3) conv_bias_ = s.stacked({op.biases.begin(), op.biases.begin() + 3});
  }

 protected:
  void run_forward(BlockRun& run) const override {
    if (run.cache().state.defined()) return generate(run);
    const Tensor given = run.take(in()), y = run.activation({run.rows(), shape_.width()});
    const StateSpaceShape shape = shape_of(run);
    scan(run, given, convolved(run, mixed(given), shape.rows), shape, {}, y);
    run.set(out(), y);
  }

  void run_backward(BlockRun& run) const override {
    Kernels& k = run.kernels();
    const StateSpaceShape shape = shape_of(run);
    const std::int64_t heads = shape.heads;
    const Tensor given = run.take_kept(in()), d_given = run.activation({run.rows(), given.cols()}),
                 d_mixed = run.statistic({run.rows(), shape.mixed_width()}),
                 terms = run.statistic({run.rows(), 3 * heads});
    {
      const Tensor dy = run.take_gradient(out());
      k.state_space_backward(tensors(given, convolved(run, mixed(given), shape.rows)), shape, dy,
                             run.statistic({shape.workspace(true)}),
                             {z(d_given), d_mixed, dt(d_given), terms});
    }
    k.convolve_backward(mixed(given), taps_.value, conv_bias_.value, shape.rows, d_mixed, mixed(d_given));
    run.set_gradient(in(), d_given);
    run.weight_gradient(
        [this, &k, sums = run.sums(), x = mixed(given), d_mixed, terms, heads, rows = shape.rows] {
          const Weight* const taps[] = {&taps_};
          sums.add(taps, [&](Range, std::span<const Tensor> gradients, bool) {
            k.convolve_backward_weight(x, d_mixed, rows, gradients[0]);
          });
          if (conv_bias_.defined()) sums.add_bias(conv_bias_, d_mixed);
          sums.add_bias(dt_bias_, terms.column_range(0, heads));
          sums.add_bias(a_log_, terms.column_range(heads, 2 * heads));
          sums.add_bias(d_, terms.column_range(2 * heads, 3 * heads));
        });
  }

 private:
  StateSpaceShape shape_of(const BlockRun& run) const {
    const Sequences& sequences = run.microbatch().sequences;
    StateSpaceShape shape = shape_;
    shape.rows = {sequences.batch, sequences.batch == 0 ? 0 : run.rows() / sequences.batch,
                  sequences.first_positions};
    return shape;
  }

  // Columns of [z | x | B | C | dt].
  Tensor z(const Tensor& given) const { return given.column_range(0, shape_.width()); }
  Tensor mixed(const Tensor& given) const {
    return given.column_range(shape_.width(), shape_.width() + shape_.mixed_width());
  }
  Tensor dt(const Tensor& given) const {
    return given.column_range(given.cols() - shape_.heads, given.cols());
  }
  StateSpaceTensors tensors(const Tensor& given, const Tensor& convolved) const {
    return {z(given), convolved, dt(given), dt_bias_.value, a_log_.value, d_.value};
  }

  Tensor convolved(const BlockRun& run, const Tensor& x, const SequenceRows& rows) const {
    const Tensor y = run.statistic({x.rows(), x.cols()});
    run.kernels().convolve(x, taps_.value, conv_bias_.value, rows, y);
    return y;
  }
  void scan(const BlockRun& run, const Tensor& given, const Tensor& convolved, const StateSpaceShape& shape,
            const Tensor& state, const Tensor& y) const {
    run.kernels().state_space(tensors(given, convolved), shape, run.statistic({shape.workspace(false)}),
                              state, y);
  }

  // New tokens are convolved behind the last ones of the cache, and go on with its state.
  void generate(BlockRun& run) const {
    Kernels& k = run.kernels();
    const BlockCache& cache = run.cache();
    if (run.position() == 0) {
      k.fill(cache.tail, 0.0);
      k.fill(cache.state, 0.0);
    }
    const Tensor given = run.take(in()), y = run.activation({run.rows(), shape_.width()});
    const std::int64_t before = cache.tail.rows(), all = before + run.rows();
    const Tensor x = run.activation({all, shape_.mixed_width()});
    k.copy(cache.tail, x.row_range(0, before));
    k.copy(mixed(given), x.row_range(before, all));
    k.copy(x.row_range(all - before, all), cache.tail);
    StateSpaceShape shape = shape_;
    shape.rows = {1, run.rows(), {}};
    const Tensor made = convolved(run, x, {1, all, {}});
    scan(run, given, made.row_range(before, all), shape, cache.state, y);
    run.set(out(), y);
  }

  StateSpaceShape shape_;  // of no rows
  Weight taps_, conv_bias_, dt_bias_, a_log_, d_;
};

}  // namespace

std::unique_ptr<OpRunner> make_state_space_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<StateSpaceOp>(op, s);
}

}  // namespace echelon
