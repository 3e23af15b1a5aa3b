// A matrix product with a parameter: by columns, behind which each tp rank has its columns, or by rows,
// behind which each has a part of the sum. Where it enters by columns, the sum of the input's gradient over
// tp is under way while the weight's gradient is computed.
#include <memory>
#include <utility>
#include <vector>

#include "model/op.h"
#include "tensor/expert_products.h"

namespace echelon {
namespace {

class LinearOp : public OpRunner {
 public:
  LinearOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        weights_(s.runs(op.weights)),
        biases_(s.runs(op.biases)),
        in_out_(op.order == WeightOrder::in_out) {}

 protected:
  void run_forward(BlockRun& run) const override {
    Tensor x = run.take_input(op());
    const Tensor y = run.activation({run.rows(), columns()});
    each_run(weights_, in_out_, y, [&](const Weight& w, const Tensor& part) {
      run.kernels().matmul(x, Transpose::no, w.value, in_out_ ? Transpose::no : Transpose::yes, part, false);
    });
    x = Tensor();
    each_run(biases_, false, y,
             [&](const Weight& b, const Tensor& part) { run.kernels().add_bias(b.value, part); });
    run.set(out(), y);
  }

  Tensor input_gradient(BlockRun& run, const Tensor& dy) const {
    Tensor dx = run.activation({run.rows(), weights_.front().value.dim(in_out_ ? 0 : 1)});
    bool further = false;
    each_run(weights_, in_out_, dy, [&](const Weight& w, const Tensor& part) {
      run.kernels().matmul(part, Transpose::no, w.value, in_out_ ? Transpose::yes : Transpose::no, dx,
                           std::exchange(further, true));
    });
    return dx;
  }

  bool trains_weights() const { return any_trained(weights_); }
  bool trains_biases() const { return any_trained(biases_); }

  void add_weight_gradient(Kernels& kernels, const Tensor& x, const Tensor& dy) const {
    each_run(weights_, in_out_, dy, [&](const Weight& w, const Tensor& part) {
      const Tensor &rows = in_out_ ? x : part, &cols = in_out_ ? part : x;
      if (w.gradient.defined()) kernels.matmul(rows, Transpose::yes, cols, Transpose::no, w.gradient, true);
    });
  }

  void add_bias_gradient(Kernels& kernels, const Tensor& dy) const {
    each_run(biases_, false, dy, [&](const Weight& b, const Tensor& part) {
      if (b.gradient.defined()) kernels.bias_gradient(part, b.gradient);
    });
  }

 private:
  static std::int64_t width(const Weight& w, bool in_out) { return w.value.dim(in_out ? 1 : 0); }
  std::int64_t columns() const {
    std::int64_t sum = 0;
    for (const Weight& w : weights_) sum += width(w, in_out_);
    return sum;
  }
  // visit(weight, its columns of y)
  template <class Visit>
  static void each_run(const std::vector<Weight>& runs, bool in_out, const Tensor& y, const Visit& visit) {
    std::int64_t begin = 0;
    for (const Weight& w : runs) {
      const std::int64_t end = begin + width(w, in_out);
      visit(w, runs.size() == 1 ? y : y.column_range(begin, end));
      begin = end;
    }
  }

  std::vector<Weight> weights_, biases_;  // in runs: see OpSetting
  bool in_out_;                           // how the matrix is stored
};

class RowLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    Tensor dy = run.take_gradient(out());
    run.set_gradient(in(), input_gradient(run, dy));
    if (trains_weights())
      run.weight_gradient(in(),
                          [this, &k = run.kernels(), dy](const Tensor& x) { add_weight_gradient(k, x, dy); });
    if (trains_biases()) run.weight_gradient([this, &k = run.kernels(), dy] { add_bias_gradient(k, dy); });
  }
};

class ColumnLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    std::shared_ptr<InputAgain> x;
    if (trains_weights()) {
      x = std::make_shared<InputAgain>(run.tensor_parallel(), run.take_kept(in()), run.rows());
      if (run.when() == Weights::now) x->begin();  // it travels beside the next product
    }
    InFlight entering;
    {
      const Tensor dy = run.take_gradient(out());
      entering = run.tensor_parallel().enter_backward(input_gradient(run, dy), run.rows());
      if (x || trains_biases())
        run.weight_gradient([this, &k = run.kernels(), x, dy] {
          if (x) add_weight_gradient(k, x->whole(), dy);
          add_bias_gradient(k, dy);
        });
      x.reset();
    }
    run.add_gradient(in(), entering.get());
  }
};

}  // namespace

std::unique_ptr<OpRunner> make_linear_op(const BlockOp& op, const OpSetting& s) {
  const bool by_columns = op.weights.front().shard_dim == (op.order == WeightOrder::in_out ? 1 : 0);
  if (by_columns) return std::make_unique<ColumnLinearOp>(op, s);
  return std::make_unique<RowLinearOp>(op, s);
}

}  // namespace echelon
