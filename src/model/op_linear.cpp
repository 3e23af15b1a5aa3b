// A matrix product with a parameter: by columns, behind which each tp rank has its columns, or by rows,
// behind which each has a part of the sum, or with a whole one, for the rows that a rank has. Where it enters
// by columns, the sum of the input's gradient over tp is under way while the weight's gradient is computed.
#include "model/op.h"

namespace echelon {
namespace {

class LinearOp : public OpRunner {
 public:
  LinearOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        weight_(s.stacked(op.weights)),
        bias_(s.stacked(op.biases)),
        in_out_(op.order == WeightOrder::in_out) {}

 protected:
  void run_forward(BlockRun& run) const override {
    Tensor x = run.take_input(op());
    const Tensor y = run.activation({x.rows(), weight_.value.dim(in_out_ ? 1 : 0)});
    run.kernels().matmul(x, Transpose::no, weight_.value, in_out_ ? Transpose::no : Transpose::yes, y, false);
    x = Tensor();
    if (bias_.defined()) run.kernels().add_bias(bias_.value, y);
    run.set(out(), y);
  }

  Tensor input_gradient(BlockRun& run, const Tensor& dy) const {
    Tensor dx = run.activation({dy.rows(), weight_.value.dim(in_out_ ? 0 : 1)});
    run.kernels().matmul(dy, Transpose::no, weight_.value, in_out_ ? Transpose::yes : Transpose::no, dx,
                         false);
    return dx;
  }

  void add_weight_gradient(Kernels& kernels, const Tensor& x, const Tensor& dy) const {
    const Tensor &rows = in_out_ ? x : dy, &cols = in_out_ ? dy : x;
    kernels.matmul(rows, Transpose::yes, cols, Transpose::no, weight_.gradient, true);
    if (bias_.defined()) kernels.bias_gradient(dy, bias_.gradient);
  }

 private:
  Weight weight_, bias_;
  bool in_out_;  // how the matrix is stored
};

class RowLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    Tensor dy = run.take_gradient(out());
    run.set_gradient(in(), input_gradient(run, dy));
    run.weight_gradient(in(),
                        [this, &k = run.kernels(), dy](const Tensor& x) { add_weight_gradient(k, x, dy); });
  }
};

class WholeLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out());
    const Tensor dx = input_gradient(run, dy);
    run.weight_gradient(
        [this, &k = run.kernels(), x = run.take_kept(in()), dy] { add_weight_gradient(k, x, dy); });
    run.add_gradient(in(), dx);
  }
};

class ColumnLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    const auto x = std::make_shared<InputAgain>(run.tensor_parallel(), run.take_kept(in()), run.rows());
    if (run.when() == Weights::now) x->begin();  // it travels beside the next product
    InFlight entering;
    {
      const Tensor dy = run.take_gradient(out());
      entering = run.tensor_parallel().enter_backward(input_gradient(run, dy), run.rows());
      run.weight_gradient([this, &k = run.kernels(), x, dy] { add_weight_gradient(k, x->whole(), dy); });
    }
    run.add_gradient(in(), entering.get());
  }
};

}  // namespace

std::unique_ptr<OpRunner> make_linear_op(const BlockOp& op, const OpSetting& s) {
  if (op.weights.front().shard_dim < 0) return std::make_unique<WholeLinearOp>(op, s);
  const bool by_columns = op.weights.front().shard_dim == (op.order == WeightOrder::in_out ? 1 : 0);
  if (by_columns) return std::make_unique<ColumnLinearOp>(op, s);
  return std::make_unique<RowLinearOp>(op, s);
}

}  // namespace echelon
