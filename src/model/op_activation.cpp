// An activation, with or without a gate. One without a gate may run in the pass that computes the product
// before it, if that is left to it (BlockRun::take_left), or in the pass that adds its bias. The backward
// pass works in place: the memory of the input and of the output's gradient receives the output, which the
// next product's weight gradients need, and the input's gradient. Without a gate, the next product's backward
// pass may already have done this.
#include "model/op.h"
#include "tensor/layer_products.h"

namespace echelon {
namespace {

class ActivationOp final : public OpRunner {
 public:
  ActivationOp(const BlockOp& op, const OpSetting&) : OpRunner(op), activation_(op.activation) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const LeftProduct left = run.take_left();
    const Tensor h = run.take(in()),
                 y = run.activation({h.rows(), h.cols() / (is_gated(activation_) ? 2 : 1)});
    if (is_gated(activation_))
      run.kernels().gated(activation_, h, y);
    else if (left.product)
      multiply(run.kernels(), *left.product, left.formats,
               {.bias = left.bias, .activation = activation_, .activated = y});
    else
      run.kernels().activate(activation_, h, left.bias, y);
    run.set(out(0), h);
    run.set(out(1), y);
  }

  // The output comes of the backward pass, but where the next product is made again too.
  void run_again(BlockRun& run) const override {
    if (run.is_taken(out(1))) return run_forward(run);
    const LeftProduct left = run.take_left();
    const Tensor h = run.take(in());
    if (left.product)
      multiply(run.kernels(), *left.product, left.formats, {.bias = left.bias});
    else if (left.bias.defined())
      run.kernels().add_bias(left.bias, h);
    run.set(out(0), h);
  }

  void run_backward(BlockRun& run) const override {
    if (run.has_gradient(out(0))) return run.set_gradient(in(), run.take_gradient(out(0)));
    Tensor h = run.take_kept(out(0)), dy = run.take_gradient(out(1));
    if (is_gated(activation_)) {
      run.kernels().gated_backward(activation_, h, dy);
      std::swap(h, dy);
    } else {
      run.kernels().activate_backward(activation_, h, dy);
    }
    run.set_gradient(in(), std::move(dy));
    run.provide(out(1), std::move(h));
  }

 private:
  Activation activation_;
};

// xielu, with two numbers that the layer learns: each row adds to their gradients, over this rank's columns.
class XieluOp final : public OpRunner {
 public:
  XieluOp(const BlockOp& op, const OpSetting& s) : OpRunner(op), alphas_(s.stacked(op.weights)) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor h = run.take(in()), y = run.activation({h.rows(), h.cols()});
    run.kernels().xielu(h, alphas_.value, y);
    run.set(out(0), h);
    run.set(out(1), y);
  }

  void run_again(BlockRun& run) const override {
    if (run.is_taken(out(1))) return run_forward(run);
    run.set(out(0), run.take(in()));
  }

  void run_backward(BlockRun& run) const override {
    Tensor h = run.take_kept(out(0)), dy = run.take_gradient(out(1));
    const Tensor dalphas = run.statistic({h.rows(), 2});
    run.kernels().xielu_backward(h, alphas_.value, dy, dalphas);
    if (alphas_.gradient.defined()) run.sums().add_bias(alphas_, dalphas);
    run.set_gradient(in(), std::move(dy));
    run.provide(out(1), std::move(h));
  }

 private:
  Weight alphas_;
};

}  // namespace

std::unique_ptr<OpRunner> make_activation_op(const BlockOp& op, const OpSetting& s) {
  if (op.activation == Activation::xielu) return std::make_unique<XieluOp>(op, s);
  return std::make_unique<ActivationOp>(op, s);
}

}  // namespace echelon
