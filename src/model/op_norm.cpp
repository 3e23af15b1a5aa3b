// LayerNorm or RMSNorm. Its statistics are kept, and its output made again from them.
#include "layer/norm.h"
#include "model/op.h"

namespace echelon {
namespace {

class NormOp : public OpRunner {
 public:
  NormOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op), norm_(s.stacked(op.weights), s.stacked(op.biases), s.plan.model.norm_eps) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take(in()), stats = run.statistic({x.rows(), norm_.stats_width()}),
                 y = run.activation({x.rows(), x.cols()});
    norm_.forward(run.kernels(), x, y, stats);
    run.set(out(0), y);
    run.set(out(1), stats);
  }

  void run_again(BlockRun& run) const override {
    const Tensor& stats = run.value(out(1));
    if (!stats.defined()) return run_forward(run);
    const Tensor x = run.take(in()), y = run.activation({x.rows(), x.cols()});
    norm_.forward_again(run.kernels(), x, stats, y);
    run.set(out(0), y);
  }

  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out(0)), dx = run.gradient_to_add_to(in());
    const Tensor &x = run.value(in()), &stats = run.value(out(1));
    norm_.backward_weight(run.kernels(), dy, x, stats);
    norm_.backward_input(run.kernels(), dy, x, stats, dx);
  }

 private:
  Norm norm_;
};

}  // namespace

std::unique_ptr<OpRunner> make_norm_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<NormOp>(op, s);
}

}  // namespace echelon
