// Multiplies attention's output by the sigmoid of a gate projected beside it. The backward pass recomputes
// the output, which the next product's weight gradients need.
#include <utility>

#include "model/op.h"

namespace echelon {
namespace {

class GateOp final : public OpRunner {
 public:
  using OpRunner::OpRunner;

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take(in(0)), gate = run.take(in(1)), y = run.activation({x.rows(), x.cols()});
    run.kernels().sigmoid_gate(x, gate, y);
    run.set(out(), y);
  }

  void run_backward(BlockRun& run) const override {
    const Tensor x = run.take_kept(in(0)), y = run.activation({x.rows(), x.cols()});
    Tensor gate = run.take_kept(in(1)), dy = run.take_gradient(out());
    run.kernels().sigmoid_gate_backward(x, gate, dy, y);
    run.set_gradient(in(0), std::move(dy));
    run.set_gradient(in(1), std::move(gate));
    run.provide(out(), y);
  }
};

}  // namespace

std::unique_ptr<OpRunner> make_gate_op(const BlockOp& op, const OpSetting&) {
  return std::make_unique<GateOp>(op);
}

}  // namespace echelon
