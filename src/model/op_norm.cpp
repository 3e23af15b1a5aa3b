// LayerNorm or RMSNorm. Its statistics are kept, and its output is recomputed from them.
#include <algorithm>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "base/split.h"
#include "model/op.h"
#include "spec/sum_blocks.h"
#include "tensor/sum_by_blocks.h"

namespace echelon {
namespace {

struct Norm {
  Weight weight, bias;  // undefined if the norm has none
  double eps;
  bool centered = false;  // LayerNorm, otherwise RMSNorm

  // For x (N, C). `again`: uses given statistics instead of computing them.
  void forward(Kernels& k, const Tensor& x, const Tensor& stats, const Tensor& y, bool again) const {
    if (centered && again)
      k.layer_norm_again(x, weight.value, bias.value, stats, y);
    else if (centered)
      k.layer_norm(x, weight.value, bias.value, eps, y, stats);
    else if (again)
      k.rms_norm_again(x, weight.value, stats, y);
    else
      k.rms_norm(x, weight.value, eps, y, stats);
  }
  // Adds to dx, and to the gradients of the weights that are trained.
  void backward(const BlockRun& run, const Tensor& dy, const Tensor& x, const Tensor& stats,
                const Tensor& dx) const {
    if (centered)
      weight_gradients(run, dy, x, stats);
    else if (weight.gradient.defined())
      add_rms_gradient(run, weight, {{dy}, {x}, {stats, false}});
    backward_input(run, dy, x, stats, dx);
  }
  void backward_input(const BlockRun& run, const Tensor& dy, const Tensor& x, const Tensor& stats,
                      const Tensor& dx) const {
    if (centered)
      run.kernels().layer_norm_backward_input(dy, x, weight.value, stats, dx);
    else
      run.kernels().rms_norm_backward_input(dy, x, weight.value, stats, dx);
  }
  // RMSNorm: for dy, x and statistics, and then those of further norms that share the weight.
  static void add_rms_gradient(const BlockRun& run, const Weight& weight,
                               std::vector<RowsOfGradient> tensors) {
    const Weight* const one[] = {&weight};
    run.sums().accumulate(one, std::move(tensors),
                          [&](std::span<const Tensor> parts, std::span<const Tensor> gradients) {
                            for (; !parts.empty(); parts = parts.subspan(3))
                              run.kernels().rms_norm_backward_weight(parts[0], parts[1], parts[2].flat(),
                                                                     gradients[0]);
                          });
  }
  void weight_gradients(const BlockRun& run, const Tensor& dy, const Tensor& x, const Tensor& stats) const {
    const bool trains_bias = bias.gradient.defined();
    if (!weight.gradient.defined()) {
      if (trains_bias) run.sums().add_bias(bias, dy);
      return;
    }
    // One pass computes both: if the bias is frozen or missing, its gradient is discarded.
    Tensor unused;
    if (!trains_bias) {
      unused = run.statistic(weight.value.shape());
      run.kernels().fill(unused, 0.0);
    }
    std::vector<const Weight*> both{&weight};
    if (trains_bias) both.push_back(&bias);
    run.sums().accumulate(both, {{dy}, {x}, {stats, false}},
                          [&](std::span<const Tensor> parts, std::span<const Tensor> gradients) {
                            run.kernels().layer_norm_backward_weight(
                                parts[0], parts[1], parts[2].flat(), gradients[0],
                                trains_bias ? gradients[1] : unused.flat_range(0, parts[0].cols()));
                          });
  }
};

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
  virtual void normalize(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                         bool again) const = 0;
};

class RowNormOp final : public NormOp {
 public:
  RowNormOp(const BlockOp& op, const OpSetting& s)
      : NormOp(op), norm_{s.stacked(op.weights), s.stacked(op.biases), s.plan.model.norm_eps, op.centered} {}

 protected:
  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out(0)), dx = run.gradient_to_add_to(in());
    norm_.backward(run, dy, run.value(in()), run.value(out(1)), dx);
  }

 private:
  std::vector<std::int64_t> stats_shape(const Tensor& x) const override {
    return {x.rows(), norm_.centered ? 2 : 1};  // mean and rstd, or rstd
  }
  void normalize(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                 bool again) const override {
    norm_.forward(kernels, x, stats, y, again);
  }

  Norm norm_;
};

// RMSNorm of each of this rank's heads, of all queries and all keys, or of the channels of each group:
// several norms of a few columns each.
class HeadNormOp : public NormOp {
 public:
  HeadNormOp(const BlockOp& op, const OpSetting& s) : NormOp(op) {
    if (s.plan.numerics == Numerics::invariant && !op.weights.empty() && op.weights.front().tp_partial)
      blocks_ = sum_blocks({heads_of(op)}, s.tensor_parallel.size(), s.tensor_parallel.index());
    for (std::size_t i = 0; i < op.heads.size(); ++i) {
      // With fewer heads than ranks, several neighbouring ranks hold the same head.
      const auto here = std::max<std::int64_t>(op.heads[i] / s.tensor_parallel.size(), 1);
      if (op.weights.empty()) {
        for (std::int64_t h = 0; h < here; ++h) add({}, s.plan.model.head_dim, s);
        continue;
      }
      const Weight weight = s.stacked({op.weights[i]});
      const bool is_whole = op.weights[i].shard_dim < 0;  // all heads share one weight
      const std::int64_t width = weight.value.numel() / (is_whole ? 1 : here);
      for (std::int64_t h = 0; h < here; ++h)
        add(is_whole ? weight : part_of(weight, 0, {h * width, (h + 1) * width}), width, s);
    }
  }

 protected:
  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out(0)), dx = run.activation({dy.rows(), dy.cols()});
    const Tensor &x = run.value(in()), &stats = run.value(out(1));
    run.kernels().fill(dx, 0.0);
    run.kernels().copy(behind_heads(dy), behind_heads(dx));
    // Heads of a kind share a weight.
    for (std::size_t first = 0, end = 0; first < heads_.size(); first = end) {
      const Weight& weight = heads_[first].weight;
      if (!weight.value.defined()) break;
      while (end < heads_.size() && heads_[end].weight.value.begins_with(weight.value)) ++end;
      if (!weight.gradient.defined()) continue;
      std::vector<RowsOfGradient> tensors;
      for (std::size_t h = first; h < end; ++h)
        tensors.insert(tensors.end(), {{head(dy, h)}, {head(x, h)}, {stats_of(stats, h), false}});
      if (blocks_.empty())
        Norm::add_rms_gradient(run, weight, std::move(tensors));
      else
        add_by_blocks(run, weight, {static_cast<std::int64_t>(first), static_cast<std::int64_t>(end)},
                      std::move(tensors));
    }
    backward_input(run, dy, x, stats, dx);
    run.set_gradient(in(), dx);
  }
  std::vector<std::int64_t> stats_shape(const Tensor& x) const override {
    return {std::ssize(heads_) * x.rows()};
  }
  void normalize(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                 bool again) const override {
    kernels.copy(behind_heads(x), behind_heads(y));
    for (std::size_t h = 0; h < heads_.size(); ++h)
      heads_[h].forward(kernels, head(x, h), stats_of(stats, h), head(y, h), again);
  }
  // Adds to dx.
  virtual void backward_input(const BlockRun& run, const Tensor& dy, const Tensor& x, const Tensor& stats,
                              const Tensor& dx) const {
    for (std::size_t h = 0; h < heads_.size(); ++h)
      heads_[h].backward_input(run, head(dy, h), head(x, h), stats_of(stats, h), head(dx, h));
  }

  const std::vector<Norm>& heads() const { return heads_; }
  Tensor head(const Tensor& x, std::size_t h) const {
    return x.column_range(first_column(h), first_column(h + 1));
  }
  Tensor behind_heads(const Tensor& x) const { return x.column_range(first_column(heads_.size()), x.cols()); }
  Tensor stats_of(const Tensor& stats, std::size_t h) const {
    const std::int64_t rows = stats.numel() / std::ssize(heads_), begin = static_cast<std::int64_t>(h) * rows;
    return stats.flat_range(begin, begin + rows);
  }

 private:
  // How heads are cut over tp: like the products that compute them.
  static ParamSpec heads_of(const BlockOp& op) {
    ParamSpec spec;
    spec.shard_dim = 0;
    spec.shape = {sum_of(op.heads)};
    for (std::int64_t heads : op.heads) spec.pieces.push_back({heads, 1, true});
    return spec;
  }
  // The gradient of a weight that all heads of a kind share, for each sequence: sums over the heads of a
  // block in order, and over blocks by their tree, also across tp. For the whole tp group, one rank then adds
  // it to the sums of other sequences.
  void add_by_blocks(const BlockRun& run, const Weight& weight, Range kind,
                     std::vector<RowsOfGradient> tensors) const {
    const Weight* const one[] = {&weight};
    Kernels& k = run.kernels();
    const TensorParallel& tp = run.tensor_parallel();
    run.sums().accumulate(
        one, std::move(tensors), [&](std::span<const Tensor> parts, std::span<const Tensor> gradients) {
          const auto room = [&] { return run.statistic({gradients[0].numel()}); };
          const Tensor sum = room();
          sum_by_blocks(k, std::ssize(blocks_), sum, room, [&](std::int64_t b, const Tensor& to) {
            k.fill(to, 0.0);
            for (const Range& range : blocks_[static_cast<std::size_t>(b)])
              if (range.begin >= kind.begin && range.end <= kind.end)
                for (std::int64_t h = range.begin; h < range.end; ++h) {
                  const auto at = static_cast<std::size_t>(3 * (h - kind.begin));
                  k.rms_norm_backward_weight(parts[at], parts[at + 1], parts[at + 2].flat(), to);
                }
          });
          run.rank().along(Axis::tp).all_reduce(sum).wait();
          if (tp.index() == 0)
            k.add(sum, gradients[0]);
          else
            k.fill(gradients[0], -0.0);
        });
  }
  void add(const Weight& weight, std::int64_t width, const OpSetting& s) {
    heads_.push_back({weight, {}, s.plan.model.head_norm_eps()});
    widths_.push_back(width);
  }
  std::int64_t first_column(std::size_t h) const {
    return std::accumulate(widths_.begin(), widths_.begin() + static_cast<std::ptrdiff_t>(h),
                           std::int64_t{0});
  }

  std::vector<Norm> heads_;  // by head
  std::vector<std::int64_t> widths_;
  SumBlocks blocks_;  // for sums over the heads of a kind, under invariant numerics
};

// Norms whose columns are cut over several tp ranks: of all queries and all keys (OLMo 2), or of a group of a
// state space's heads. The ranks' partial sums over a row are all-reduced, those of queries and keys
// together. Under invariant numerics even a single rank sums in blocks of heads.
class CutNormOp final : public HeadNormOp {
 public:
  CutNormOp(const BlockOp& op, const OpSetting& s)
      : HeadNormOp(op, s), rank_(s.rank), sharing_(ranks_of_a_norm(op, s.tensor_parallel.size())) {
    const int index = s.tensor_parallel.index() % sharing_;
    for (std::size_t i = 0; i < op.weights.size(); ++i) {
      ParamSpec one = op.weights[i];
      one.shape.front() = one.pieces.front().length /= op.heads[i];
      const std::int64_t here = std::max<std::int64_t>(op.heads[i] / s.tensor_parallel.size(), 1);
      for (std::int64_t h = 0; h < here; ++h) {
        // Columns that several ranks hold are counted several times in a sum. Each copy's gradient is part of
        // that column's gradient, so the column's share of the sum is divided over the copies.
        columns_.push_back(static_cast<double>(one.numel() * tp_replicas(one, sharing_)));
        of_columns_.push_back(s.plan.numerics == Numerics::invariant ? sum_blocks({one}, sharing_, index)
                                                                     : SumBlocks());
      }
    }
  }

  // How many tp ranks share a norm.
  static int ranks_of_a_norm(const BlockOp& op, int tp) {
    return tp / static_cast<int>(std::min<std::int64_t>(op.heads.front(), tp));
  }

 private:
  void normalize(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y,
                 bool again) const override {
    if (again) return HeadNormOp::normalize(kernels, x, stats, y, again);
    kernels.copy(behind_heads(x), behind_heads(y));
    add_up(kernels, stats, [&](std::size_t i, Range columns, const Tensor& to) {
      kernels.row_squares(columns_of(head(x, i), columns), to);
    });
    for (std::size_t i = 0; i < columns_.size(); ++i)
      kernels.rms_norm_of_squares(head(x, i), heads()[i].weight.value, heads()[i].eps, columns_[i],
                                  head(y, i), stats_of(stats, i));
  }
  void backward_input(const BlockRun& run, const Tensor& dy, const Tensor& x, const Tensor& stats,
                      const Tensor& dx) const override {
    Kernels& kernels = run.kernels();
    const Tensor sums = run.statistic(stats.shape());
    add_up(kernels, sums, [&](std::size_t i, Range columns, const Tensor& to) {
      kernels.rms_norm_backward_sums(columns_of(head(dy, i), columns), columns_of(head(x, i), columns),
                                     heads()[i].weight.value.flat_range(columns.begin, columns.end),
                                     stats_of(stats, i), to);
    });
    for (std::size_t i = 0; i < columns_.size(); ++i)
      kernels.rms_norm_backward_input_of_sums(head(dy, i), head(x, i), heads()[i].weight.value,
                                              stats_of(stats, i), stats_of(sums, i), columns_[i],
                                              head(dx, i));
  }

  // sums = the sums over rows for each norm, over all its ranks. make(which, columns, to) computes one norm's
  // sums over some columns.
  template <class Make>
  void add_up(Kernels& kernels, const Tensor& sums, const Make& make) const {
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const Tensor sum = stats_of(sums, i);
      const SumBlocks& blocks = of_columns_[i];
      if (blocks.empty()) {
        make(i, Range{0, heads()[i].weight.value.numel()}, sum);
        continue;
      }
      sum_by_blocks(
          kernels, std::ssize(blocks), sum,
          [&] { return sums.beside(MemoryCategory::activations, sums.dtype(), sum.shape()); },
          [&](std::int64_t b, const Tensor& to) {
            make(i, blocks[static_cast<std::size_t>(b)].front(), to);
          });
    }
    if (sharing_ > 1) rank_.tp_replicas(sharing_).all_reduce(sums).wait();
  }
  static Tensor columns_of(const Tensor& x, Range range) { return x.column_range(range.begin, range.end); }

  const Rank& rank_;
  int sharing_;
  std::vector<double> columns_;        // of each norm, over all ranks
  std::vector<SumBlocks> of_columns_;  // the blocks here, under invariant numerics
};

}  // namespace

std::unique_ptr<OpRunner> make_norm_op(const BlockOp& op, const OpSetting& s) {
  const bool is_cut = !op.weights.empty() && op.weights.front().shard_dim >= 0 &&
                      (CutNormOp::ranks_of_a_norm(op, s.tensor_parallel.size()) > 1 ||
                       s.plan.numerics == Numerics::invariant);
  if (is_cut) return std::make_unique<CutNormOp>(op, s);
  if (!op.heads.empty()) return std::make_unique<HeadNormOp>(op, s);
  return std::make_unique<RowNormOp>(op, s);
}

}  // namespace echelon
