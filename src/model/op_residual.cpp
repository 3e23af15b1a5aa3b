// x + y, plus the bias of the product that computed y, added once after the sum over tp. Without such a sum,
// it runs in the pass that computes the product (BlockRun::take_left).
#include "base/error.h"
#include "model/op.h"
#include "tensor/layer_products.h"

namespace echelon {
namespace {

class ResidualOp final : public OpRunner {
 public:
  ResidualOp(const BlockOp& op, const OpSetting& s) : OpRunner(op), bias_(s.stacked(op.biases)) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const LeftProduct left = run.take_left();
    check(!left.bias.defined(), "the bias of what is added to the residual stream is the residual op's");
    const Tensor y = run.take_input(op(), 1), &x = run.value(in(0));
    if (left.product)
      multiply(run.kernels(), *left.product, left.formats, {.bias = bias_.value, .added = x});
    else
      run.kernels().residual(x, y, bias_.value, y);
    run.set(out(), y);
  }

  void run_backward(BlockRun& run) const override {
    const Tensor d = run.take_gradient(out());
    if (bias_.gradient.defined()) run.sums().add_bias(bias_, d);
    run.leave_gradient(op(), 0, d);
    run.leave_gradient(op(), 1, d);
  }

 private:
  Weight bias_;
};

}  // namespace

std::unique_ptr<OpRunner> make_residual_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<ResidualOp>(op, s);
}

}  // namespace echelon
