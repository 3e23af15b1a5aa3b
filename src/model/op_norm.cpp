// LayerNorm or RMSNorm. Its statistics are kept, and its output made again from them.
#include <algorithm>
#include <vector>

#include "layer/norm.h"
#include "model/op.h"

namespace echelon {
namespace {

class NormOp : public OpRunner {
 public:
  using OpRunner::OpRunner;

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take(in()), stats = run.statistic(stats_shape(x)),
                 y = run.activation({x.rows(), x.cols()});
    normalize(run.kernels(), x, stats, y, false);
    run.set(out(0), y);
    run.set(out(1), stats);
  }

  void run_again(BlockRun& run) const override {
    const Tensor& stats = run.value(out(1));
    if (!stats.defined()) return run_forward(run);
    const Tensor x = run.take(in()), y = run.activation({x.rows(), x.cols()});
    normalize(run.kernels(), x, stats, y, true);
    run.set(out(0), y);
  }

 private:
  virtual std::vector<std::int64_t> stats_shape(const Tensor& x) const = 0;
  // `again`: from statistics that are there, instead of making them.
  virtual void normalize(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                         bool again) const = 0;
};

void normalize_with(const Norm& norm, Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                    bool again) {
  if (again)
    norm.forward_again(kernels, x, stats, y);
  else
    norm.forward(kernels, x, y, stats);
}

class RowNormOp final : public NormOp {
 public:
  RowNormOp(const BlockOp& op, const OpSetting& s)
      : NormOp(op), norm_(s.stacked(op.weights), s.stacked(op.biases), s.plan.model.norm_eps) {}

 protected:
  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out(0)), dx = run.gradient_to_add_to(in());
    const Tensor &x = run.value(in()), &stats = run.value(out(1));
    norm_.backward_weight(run.kernels(), dy, x, stats);
    norm_.backward_input(run.kernels(), dy, x, stats, dx);
  }

 private:
  std::vector<std::int64_t> stats_shape(const Tensor& x) const override {
    return {x.rows(), norm_.stats_width()};
  }
  void normalize(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                 bool again) const override {
    normalize_with(norm_, kernels, x, stats, y, again);
  }

  Norm norm_;
};

// RMSNorm of each of this rank's heads: as many norms of a few columns.
class HeadNormOp final : public NormOp {
 public:
  HeadNormOp(const BlockOp& op, const OpSetting& s) : NormOp(op), width_(op.weights.front().shape[0]) {
    for (std::size_t i = 0; i < op.heads.size(); ++i) {
      // With fewer heads than ranks, neighbouring ranks hold the same one.
      const auto here = std::max<std::int64_t>(op.heads[i] / s.tensor_parallel.size(), 1);
      heads_.insert(heads_.end(), static_cast<std::size_t>(here),
                    Norm(s.stacked({op.weights[i]}), {}, s.plan.model.norm_eps));
    }
  }

 protected:
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
  std::vector<std::int64_t> stats_shape(const Tensor& x) const override {
    return {std::ssize(heads_) * x.rows()};
  }
  void normalize(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                 bool again) const override {
    kernels.copy(behind_heads(x), behind_heads(y));
    for (std::size_t h = 0; h < heads_.size(); ++h)
      normalize_with(heads_[h], kernels, head(x, h), stats_of(stats, h), head(y, h), again);
  }
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
  return std::make_unique<RowNormOp>(op, s);
}

}  // namespace echelon
