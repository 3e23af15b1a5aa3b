// Sums the tp ranks' partial sums into the residual stream, times a constant.
#include "model/op.h"

namespace echelon {
namespace {

class SumOp final : public OpRunner {
 public:
  using OpRunner::OpRunner;

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor y = run.take_input(op());
    if (op().scale != 1) run.kernels().scale(y, op().scale);
    run.set(out(), y);
  }

  // The gradient may be another reader's too.
  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out());
    if (op().scale == 1) return run.leave_gradient(op(), 0, dy);
    const Tensor d = run.activation({dy.rows(), dy.cols()});
    run.kernels().copy(dy, d);
    run.kernels().scale(d, op().scale);
    run.leave_gradient(op(), 0, d);
  }
};

}  // namespace

std::unique_ptr<OpRunner> make_sum_op(const BlockOp& op, const OpSetting&) {
  return std::make_unique<SumOp>(op);
}

}  // namespace echelon
