// LayerNorm or RMSNorm. Its statistics are kept, and its output made again from them.
#include <algorithm>
#include <vector>

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

// RMSNorm of each of this rank's heads: as many norms of a few columns.
class HeadNormOp final : public OpRunner {
 public:
  HeadNormOp(const BlockOp& op, const OpSetting& s) : OpRunner(op), width_(op.weights.front().shape[0]) {
    for (std::size_t i = 0; i < op.heads.size(); ++i) {
      // With fewer heads than ranks, neighbouring ranks hold the same one.
      const auto here = std::max<std::int64_t>(op.heads[i] / s.tensor_parallel.size(), 1);
      heads_.insert(heads_.end(), static_cast<std::size_t>(here),
                    Norm(s.stacked({op.weights[i]}), {}, s.plan.model.norm_eps));
    }
  }

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take(in()), stats = run.activation({std::ssize(heads_) * x.rows()}),
                 y = run.activation({x.rows(), x.cols()});
    run.kernels().copy(behind_heads(x), behind_heads(y));
    for (std::size_t h = 0; h < heads_.size(); ++h)
      heads_[h].forward(run.kernels(), head(x, h), head(y, h), stats_of(stats, h));
    run.set(out(0), y);
    run.set(out(1), stats);
  }

  void run_again(BlockRun& run) const override {
    const Tensor& stats = run.value(out(1));
    if (!stats.defined()) return run_forward(run);
    const Tensor x = run.take(in()), y = run.activation({x.rows(), x.cols()});
    run.kernels().copy(behind_heads(x), behind_heads(y));
    for (std::size_t h = 0; h < heads_.size(); ++h)
      heads_[h].forward_again(run.kernels(), head(x, h), stats_of(stats, h), head(y, h));
    run.set(out(0), y);
  }

  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out(0)), dx = run.activation({dy.rows(), dy.cols()});
    const Tensor &x = run.value(in()), &stats = run.value(out(1));
    run.kernels().fill(dx, 0.0);
    run.kernels().copy(behind_heads(dy), behind_heads(dx));
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      heads_[h].backward_weight(run.kernels(), head(dy, h), head(x, h), stats_of(stats, h));
      heads_[h].backward_input(run.kernels(), head(dy, h), head(x, h), stats_of(stats, h), head(dx, h));
    }
    run.set_gradient(in(), dx);
  }

 private:
  Tensor head(const Tensor& x, std::size_t h) const {
    const auto begin = static_cast<std::int64_t>(h) * width_;
    return x.column_range(begin, begin + width_);
  }
  Tensor behind_heads(const Tensor& x) const { return x.column_range(std::ssize(heads_) * width_, x.cols()); }
  Tensor stats_of(const Tensor& stats, std::size_t h) const {
    const std::int64_t rows = stats.numel() / std::ssize(heads_), begin = static_cast<std::int64_t>(h) * rows;
    return stats.flat_range(begin, begin + rows);
  }

  std::int64_t width_;
  std::vector<Norm> heads_;  // by head
};

}  // namespace

std::unique_ptr<OpRunner> make_norm_op(const BlockOp& op, const OpSetting& s) {
  if (!op.heads.empty()) return std::make_unique<HeadNormOp>(op, s);
  return std::make_unique<NormOp>(op, s);
}

}  // namespace echelon
