// An activation of the biased input, or SwiGLU. The backward pass works in place: the input's memory and that
// of the output's gradient become the output, which the next product's weights need, and the input's
// gradient.
#include "model/op.h"

namespace echelon {
namespace {

class ActivationOp final : public OpRunner {
 public:
  ActivationOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op), activation_(op.activation), bias_(s.stacked(op.biases)) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor h = run.take(in()),
                 y = run.activation({h.rows(), h.cols() / (is_gated(activation_) ? 2 : 1)});
    if (is_gated(activation_))
      run.kernels().gated(activation_, h, y);
    else
      run.kernels().activate(activation_, h, bias_.value, y);
    run.set(out(0), h);
    run.set(out(1), y);
  }

  // The output comes of the backward pass, but where the next product is made again too.
  void run_again(BlockRun& run) const override {
    if (run.is_taken(out(1))) return run_forward(run);
    const Tensor h = run.take(in());
    if (bias_.defined()) run.kernels().add_bias(bias_.value, h);
    run.set(out(0), h);
  }

  void run_backward(BlockRun& run) const override {
    Tensor h = run.take_kept(out(0)), dy = run.take_gradient(out(1));
    if (is_gated(activation_)) {
      run.kernels().gated_backward(activation_, h, dy);
      std::swap(h, dy);
    } else {
      run.kernels().activate_backward(activation_, h, dy);
    }
    if (bias_.gradient.defined())
      run.weight_gradient([sums = run.sums(), bias = bias_, dy] { sums.add_bias(bias, dy); });
    run.set_gradient(in(), std::move(dy));
    run.provide(out(1), std::move(h));
  }

 private:
  Activation activation_;
  Weight bias_;
};

}  // namespace

std::unique_ptr<OpRunner> make_activation_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<ActivationOp>(op, s);
}

}  // namespace echelon
