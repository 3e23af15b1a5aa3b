// A matrix product with a parameter: by columns, behind which each tp rank has its columns, or by rows,
// behind which each has a part of the sum. Where it enters by columns, the sum of the input's gradient over
// tp is under way while the weight's gradient is computed.
#include "layer/linear.h"
#include "model/op.h"

namespace echelon {
namespace {

class LinearOp : public OpRunner {
 public:
  LinearOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op), product_(s.stacked(op.weights), s.stacked(op.biases), op.order) {}

 protected:
  void run_forward(BlockRun& run) const override {
    Tensor x = run.take_input(op());
    const Tensor y = run.activation({run.rows(), product_.out_features()});
    product_.forward(run.kernels(), x, y);
    x = Tensor();
    if (product_.bias().defined()) run.kernels().add_bias(product_.bias(), y);
    run.set(out(), y);
  }

  Tensor input_gradient(BlockRun& run, const Tensor& dy) const {
    Tensor dx = run.activation({run.rows(), product_.in_features()});
    product_.backward_input(run.kernels(), dy, dx);
    return dx;
  }

  Linear product_;
};

class RowLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    Tensor dy = run.take_gradient(out());
    run.set_gradient(in(), input_gradient(run, dy));
    run.weight_gradient(in(), [&k = run.kernels(), product = product_, dy](const Tensor& x) {
      product.backward_weight(k, x, dy);
    });
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
      run.weight_gradient(
          [&k = run.kernels(), product = product_, x, dy] { product.backward_weight(k, x->whole(), dy); });
    }
    run.set_gradient(in(), entering.get());
  }
};

}  // namespace

std::unique_ptr<OpRunner> make_linear_op(const BlockOp& op, const OpSetting& s) {
  const bool by_columns = op.weights.front().shard_dim == (op.order == WeightOrder::in_out ? 1 : 0);
  if (by_columns) return std::make_unique<ColumnLinearOp>(op, s);
  return std::make_unique<RowLinearOp>(op, s);
}

}  // namespace echelon
