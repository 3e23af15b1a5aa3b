// Concatenates two values by columns.
#include "model/op.h"

namespace echelon {
namespace {

class JoinOp final : public OpRunner {
 public:
  using OpRunner::OpRunner;

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take(in(0)), y = run.take(in(1));
    const Tensor both = run.activation({x.rows(), x.cols() + y.cols()});
    run.kernels().copy(x, both.column_range(0, x.cols()));
    run.kernels().copy(y, both.column_range(x.cols(), both.cols()));
    run.set(out(), both);
  }

  void run_backward(BlockRun& run) const override {
    const Tensor d = run.take_gradient(out());
    const std::int64_t width = d.cols() / 2;
    for (const std::size_t i : {std::size_t{0}, std::size_t{1}}) {
      const auto begin = static_cast<std::int64_t>(i) * width;
      const Tensor part = run.activation({d.rows(), width});
      run.kernels().copy(d.column_range(begin, begin + width), part);
      run.set_gradient(in(i), part);
    }
  }
};

}  // namespace

std::unique_ptr<OpRunner> make_join_op(const BlockOp& op, const OpSetting&) {
  return std::make_unique<JoinOp>(op);
}

}  // namespace echelon
