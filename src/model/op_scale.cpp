// Multiplies the columns that some weights produced by a constant each, in place (Falcon-H1,
// https://arxiv.org/abs/2507.22448).
#include <utility>
#include <vector>

#include "model/op.h"

namespace echelon {
namespace {

class ScaleOp final : public OpRunner {
 public:
  ScaleOp(const BlockOp& op, const OpSetting& s) : OpRunner(op) {
    std::int64_t begin = 0;
    for (const auto& [made_by, factor] : op.scaled) {
      const std::int64_t end = begin + s.parameters.weight(made_by.name).value.rows();
      if (factor != 1) columns_.push_back({{begin, end}, factor});
      begin = end;
    }
  }

 protected:
  void run_forward(BlockRun& run) const override { run.set(out(), scaled(run, run.take(in()))); }
  void run_backward(BlockRun& run) const override {
    run.set_gradient(in(), scaled(run, run.take_gradient(out())));
  }

 private:
  Tensor scaled(const BlockRun& run, Tensor x) const {
    for (const auto& [range, factor] : columns_)
      run.kernels().scale(x.column_range(range.begin, range.end), factor);
    return x;
  }

  std::vector<std::pair<Range, double>> columns_;
};

}  // namespace

std::unique_ptr<OpRunner> make_scale_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<ScaleOp>(op, s);
}

}  // namespace echelon
