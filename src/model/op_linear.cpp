// A matrix product with a parameter. Column-parallel: each tp rank gets its own columns. Row-parallel: each
// gets a partial sum. Or with a whole matrix, on the rank's own rows. In the column-parallel case, the sum of
// the input's gradient over tp is in flight while the weight's gradient is computed. LoRA adapters
// (spec/fine_tuning.h) stand beside the matrix.
//
// Under invariant numerics, if tp cuts the sum of an adapter's first product, that is summed over tp so that
// each rank has it whole. The second product's result is then added once: column-parallel, to the whole
// gradient of the input; row-parallel, to the first block's sum. Of the gradient of a whole factor, each rank
// sums a part.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/halving_tree.h"
#include "base/split.h"
#include "model/op.h"
#include "spec/sum_blocks.h"
#include "tensor/expert_products.h"
#include "tensor/layer_products.h"
#include "tensor/sum_by_blocks.h"

namespace echelon {
namespace {

class LinearOp : public OpRunner {
 public:
  LinearOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        kernels_(s.rank.kernels()),
        tensor_parallel_(s.tensor_parallel),
        weights_(s.runs(op.weights)),
        biases_(s.runs(op.biases)),
        in_out_(op.order == WeightOrder::in_out),
        is_cut_(op.weights.front().shard_dim >= 0),
        in_blocks_(is_cut_ && s.plan.numerics == Numerics::invariant),
        formats_(s.plan.precision) {
    std::vector<std::int64_t> ends{0};  // of each matrix's columns
    for (const ParamSpec& spec : op.weights) ends.push_back(ends.back() + width(s.stacked({spec}), in_out_));
    by_columns_ = is_cut_ && op.weights.front().shard_dim == (in_out_ ? 1 : 0);
    const auto blocks_of = [&](const std::vector<ParamSpec>& list) {
      return in_blocks_ ? sum_blocks(list, s.tensor_parallel.size(), s.tensor_parallel.index()) : SumBlocks();
    };
    blocks_ = blocks_of(op.weights);
    for (const Adapter& adapter : op.adapters)
      adapters_.push_back({s.stacked({adapter.a}),
                           s.stacked({adapter.b}),
                           {ends[adapter.weight], ends[adapter.weight + 1]},
                           blocks_of({by_columns_ ? adapter.b : adapter.a})});
  }

 protected:
  void run_forward(BlockRun& run) const override {
    Tensor x = run.take_input(op());
    if (in_blocks_ && !by_columns_ && !adapters_.empty()) return run_adapted_blocks(run, x);
    const std::vector<std::int64_t> shape{x.rows(), columns()};
    const Tensor y = is_cut_ && !by_columns_ ? run.partial_sum(shape) : run.activation(shape);
    const auto product = [&](const Weight& w, const Tensor& part) {
      return MatrixProduct{x,
                           Transpose::no,
                           w.value,
                           in_out_ ? Transpose::no : Transpose::yes,
                           part,
                           false,
                           by_columns_ ? SumBlocks() : blocks_};
    };
    const bool leaves = biases_.size() <= 1 && run.next_takes_product(op());
    LeftProduct left{{}, formats_.forward(), biases_.size() == 1 ? biases_.front().value : Tensor()};
    if (is_one_product() && biases_.size() <= 1) {
      if (leaves)
        left.product = product(weights_.front(), y);
      else
        multiply(run.kernels(), product(weights_.front(), y), formats_.forward(), {.bias = left.bias});
    } else {
      each_run(weights_, in_out_, y, [&](const Weight& w, const Tensor& part) {
        multiply(run.kernels(), product(w, part), formats_.forward());
      });
      if (!adapters_.empty()) run.set(adapted(), add_adapters(run, x, y));
      x = Tensor();
      if (!leaves)
        each_run(biases_, false, y,
                 [&](const Weight& b, const Tensor& part) { run.kernels().add_bias(b.value, part); });
    }
    if (leaves) run.leave(std::move(left));
    run.set(out(), y);
  }

  // Nothing else adds to what it makes.
  bool is_one_product() const { return weights_.size() == 1 && adapters_.empty(); }

  // What the second factors of adapters leave of dy, times their scale.
  Tensor adapter_gradients(BlockRun& run, const Tensor& dy) const {
    if (adapters_.empty()) return {};
    return through_adapters(run, by_columns_, [&](const LowRank& l, const Tensor& d) {
      run.kernels().matmul(columns_of(dy, l.columns), Transpose::no, l.b.value, Transpose::no, d, false,
                           by_columns_ ? l.blocks : SumBlocks());
    });
  }

  // `d_adapted`: of adapter_gradients(). What follows is of one product.
  Tensor input_gradient(BlockRun& run, const Tensor& dy, const Tensor& d_adapted,
                        const Epilogue& epilogue = {}) const {
    const std::vector<std::int64_t> shape{dy.rows(), weights_.front().value.dim(in_out_ ? 0 : 1)};
    const Tensor dx = by_columns_ ? run.partial_sum(shape) : run.activation(shape);
    bool further = false;
    if (weights_.size() > 1 && by_columns_ && in_blocks_)
      add_gradients_of_blocks(run, dy, dx);
    else
      each_run(weights_, in_out_, dy, [&](const Weight& w, const Tensor& part) {
        multiply(run.kernels(),
                 {part, Transpose::no, w.value, in_out_ ? Transpose::yes : Transpose::no, dx,
                  std::exchange(further, true), by_columns_ ? blocks_ : SumBlocks()},
                 formats_.of_input(), epilogue);
      });
    if (!adds_behind_sum()) add_adapted_gradient(run, d_adapted, dx);
    return dx;
  }
  // The same of parameters that are one matrix but not all trained: a block is made of those of each, which
  // lie apart, one after another.
  void add_gradients_of_blocks(BlockRun& run, const Tensor& dy, const Tensor& dx) const {
    const auto room = [&] { return run.statistic(dx.shape()); };
    const Tensor sum = dx.dtype() == run.rank().precision().statistics ? dx : room();
    sum_by_blocks(run.kernels(), std::ssize(blocks_), sum, room, [&](std::int64_t b, const Tensor& to) {
      bool further = false;
      for (const Range& columns : blocks_[static_cast<std::size_t>(b)]) {
        std::int64_t begin = 0;  // of a run's columns
        for (const Weight& w : weights_) {
          const std::int64_t end = begin + width(w, in_out_);
          if (columns.begin >= begin && columns.end <= end) {
            const Range of_run{columns.begin - begin, columns.end - begin};
            multiply(run.kernels(),
                     {columns_of(dy, columns), Transpose::no,
                      in_out_ ? columns_of(w.value, of_run) : w.value.row_range(of_run.begin, of_run.end),
                      in_out_ ? Transpose::yes : Transpose::no, to, std::exchange(further, true)},
                     formats_.of_input());
          }
          begin = end;
        }
      }
    });
    if (dx.dtype() != sum.dtype()) run.kernels().copy(sum, dx);
  }
  // Whether what goes through adapters is added to the gradient of the input when that is whole.
  bool adds_behind_sum() const { return in_blocks_ && by_columns_ && !adapters_.empty(); }
  void add_adapted_gradient(BlockRun& run, const Tensor& d_adapted, const Tensor& dx) const {
    each_adapter([&](const LowRank& l, Range inner) {
      run.kernels().matmul(columns_of(d_adapted, inner), Transpose::no, l.a.value, Transpose::no, dx, true);
    });
  }

  // Whether a gradient is taken that reads the input.
  bool reads_input() const {
    return any_trained(weights_) || std::any_of(adapters_.begin(), adapters_.end(),
                                                [](const LowRank& l) { return l.a.gradient.defined(); });
  }
  bool trains_second_factors() const {
    return std::any_of(adapters_.begin(), adapters_.end(),
                       [](const LowRank& l) { return l.b.gradient.defined(); });
  }
  int adapted() const { return op().outputs.back(); }
  bool trains_biases() const { return any_trained(biases_); }

  void add_weight_gradient(const SequenceSums& sums, const Tensor& x, const Tensor& dy) const {
    each_run(weights_, in_out_, dy, [&](const Weight& w, const Tensor& part) {
      const Tensor &rows = in_out_ ? x : part, &cols = in_out_ ? part : x;
      if (w.gradient.defined()) sums.add_product(w, rows, cols, formats_.of_weight(in_out_));
    });
  }

  // Both, in one pass where each is one.
  void add_weight_and_bias_gradients(const SequenceSums& sums, const Tensor& x, const Tensor& dy) const {
    const bool is_one = weights_.size() == 1 && weights_.front().gradient.defined() && biases_.size() == 1 &&
                        biases_.front().gradient.defined();
    if (is_one)
      return sums.add_product_and_bias(weights_.front(), biases_.front(), in_out_ ? x : dy, in_out_ ? dy : x,
                                       in_out_, formats_.of_weight(in_out_));
    add_weight_gradient(sums, x, dy);
    add_bias_gradient(sums, dy);
  }

  void add_first_gradients(const SequenceSums& sums, const Tensor& x, const Tensor& d_adapted) const {
    each_adapter([&](const LowRank& l, Range inner) {
      if (!l.a.gradient.defined()) return;
      const Tensor d = columns_of(d_adapted, inner);
      const auto [weight, mine] = part_here(l.a, 1, by_columns_);
      if (mine.size() > 0) sums.add_product(weight, d, columns_of(x, mine));
    });
  }

  // `made`: the value that the first factors made of the input.
  void add_second_gradients(const SequenceSums& sums, const Tensor& made, const Tensor& dy) const {
    each_adapter([&](const LowRank& l, Range inner) {
      if (!l.b.gradient.defined()) return;
      const auto [weight, mine] = part_here(l.b, 0, !by_columns_);
      if (mine.size() > 0)
        sums.add_product(weight, columns_of(columns_of(dy, l.columns), mine), columns_of(made, inner));
    });
  }

  void add_bias_gradient(const SequenceSums& sums, const Tensor& dy) const {
    each_run(biases_, false, dy, [&](const Weight& b, const Tensor& part) {
      if (b.gradient.defined()) sums.add_bias(b, part);
    });
  }

 private:
  // Of one of the matrices, whose columns of y these are.
  struct LowRank {
    Weight a, b;
    Range columns;
    SumBlocks blocks;  // of the sum over the dimension of one of them that is cut, under invariant numerics
  };

  // What make(adapter, its columns) makes of (N, ranks of all), times the scale. `is_sum`: over what is cut.
  template <class Make>
  Tensor through_adapters(BlockRun& run, bool is_sum, const Make& make) const {
    const std::vector<std::int64_t> shape{run.rows(), rank() * std::ssize(adapters_)};
    const bool adds_up = in_blocks_ && is_sum;
    const Tensor made = adds_up ? run.statistic(shape) : run.activation(shape);
    each_adapter([&](const LowRank& l, Range inner) { make(l, columns_of(made, inner)); });
    if (adds_up) run.tensor_parallel().add_up(made);
    run.kernels().scale(made, op().adapter_scale);
    return adds_up ? run.rounded(made) : made;
  }

  // What of a factor's gradient is added up here, and its rows (dimension 0) or columns.
  struct PartHere {
    Weight weight;
    Range mine;
  };
  PartHere part_here(const Weight& weight, int dim, bool is_whole) const {
    const Range all{0, weight.gradient.dim(dim)};
    if (!in_blocks_ || !is_whole) return {weight, all};
    const Range mine = split_range(all.end, tensor_parallel_.size(), tensor_parallel_.index());
    fill_others(kernels_, weight, dim, mine);
    return {part_of(weight, dim, mine), mine};
  }

  // Row-parallel: the first factors' result is whole on every rank, and the rank with the first block adds
  // the second factors' result to that block.
  void run_adapted_blocks(BlockRun& run, const Tensor& x) const {
    Kernels& k = run.kernels();
    const Tensor made = through_adapters(run, true, [&](const LowRank& l, const Tensor& d) {
      k.matmul(x, Transpose::no, l.a.value, Transpose::yes, d, false, l.blocks);
    });
    const Tensor y = run.statistic({x.rows(), columns()});
    const Range all{0, std::ssize(blocks_)};
    if (run.tensor_parallel().index() == 0)
      multiply_with_first(run, x, all, made, y);
    else
      multiply_blocks(run, x, all, y);
    run.set(adapted(), made);
    run.set(out(), run.tensor_parallel().size() == 1 ? run.rounded(y) : y);
  }

  // The node of the tree over these blocks, the first of them with what adapters add.
  void multiply_with_first(BlockRun& run, const Tensor& x, Range blocks, const Tensor& made,
                           const Tensor& y) const {
    if (blocks.size() == 1) {
      multiply_blocks(run, x, blocks, y);
      return add_second_factors(run, made, y);
    }
    const std::int64_t middle = halving_cut(blocks.begin, blocks.end);
    multiply_with_first(run, x, {blocks.begin, middle}, made, y);
    const Tensor second = run.statistic(y.shape());
    multiply_blocks(run, x, {middle, blocks.end}, second);
    run.kernels().add(second, y);
  }
  void multiply_blocks(BlockRun& run, const Tensor& x, Range blocks, const Tensor& y) const {
    const auto at = [&](std::int64_t b) -> const std::vector<Range>& {
      return blocks_[static_cast<std::size_t>(b)];
    };
    const Range inner{at(blocks.begin).front().begin, at(blocks.end - 1).back().end};  // one matrix's
    SumBlocks own;
    for (std::int64_t b = blocks.begin; b < blocks.end; ++b)
      own.push_back({{at(b).front().begin - inner.begin, at(b).back().end - inner.begin}});
    const Tensor& w = weights_.front().value;
    multiply(run.kernels(),
             {columns_of(x, inner), Transpose::no,
              in_out_ ? w.row_range(inner.begin, inner.end) : columns_of(w, inner),
              in_out_ ? Transpose::no : Transpose::yes, y, false, own},
             formats_.forward());
  }

  // Adds to y; returns what the first factors make of x, times the scale.
  Tensor add_adapters(BlockRun& run, const Tensor& x, const Tensor& y) const {
    const Tensor made = through_adapters(run, false, [&](const LowRank& l, const Tensor& d) {
      run.kernels().matmul(x, Transpose::no, l.a.value, Transpose::yes, d, false);
    });
    add_second_factors(run, made, y);
    return made;
  }
  void add_second_factors(BlockRun& run, const Tensor& made, const Tensor& y) const {
    each_adapter([&](const LowRank& l, Range inner) {
      run.kernels().matmul(columns_of(made, inner), Transpose::no, l.b.value, Transpose::yes,
                           columns_of(y, l.columns), true);
    });
  }

  std::int64_t rank() const { return adapters_.front().a.value.dim(0); }
  // visit(adapter, its columns of what all first factors make)
  template <class Visit>
  void each_adapter(const Visit& visit) const {
    for (std::size_t i = 0; i < adapters_.size(); ++i) {
      const auto begin = static_cast<std::int64_t>(i) * rank();
      visit(adapters_[i], Range{begin, begin + rank()});
    }
  }
  static Tensor columns_of(const Tensor& x, Range range) {
    return range.size() == x.cols() ? x : x.column_range(range.begin, range.end);
  }

  static std::int64_t width(const Weight& w, bool in_out) { return w.value.dim(in_out ? 1 : 0); }
  std::int64_t columns() const {
    std::int64_t sum = 0;
    for (const Weight& w : weights_) sum += width(w, in_out_);
    return sum;
  }
  // visit(weight, its columns of y)
  template <class Visit>
  static void each_run(const std::vector<Weight>& runs, bool in_out, const Tensor& y, const Visit& visit) {
    std::int64_t begin = 0;
    for (const Weight& w : runs) {
      const std::int64_t end = begin + width(w, in_out);
      visit(w, runs.size() == 1 ? y : y.column_range(begin, end));
      begin = end;
    }
  }

  Kernels& kernels_;
  TensorParallel tensor_parallel_;
  std::vector<Weight> weights_, biases_;  // in runs: see OpSetting
  std::vector<LowRank> adapters_;
  bool in_out_;  // how the matrix is stored
  bool is_cut_, by_columns_ = false;
  bool in_blocks_;  // sums over the dimension that is cut, under invariant numerics
  LayerFormats formats_;
  SumBlocks blocks_;  // they
};

class RowLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    Tensor dy = run.take_gradient(out());
    const Tensor d_adapted = adapter_gradients(run, dy);
    const BlockOp* const before = is_one_product() ? run.activation_before(op()) : nullptr;
    if (before != nullptr) {
      const int given = before->outputs.front();
      const Tensor hidden = run.value(given);
      run.set_gradient(
          given, input_gradient(run, dy, d_adapted, {.activation = before->activation, .hidden = hidden}));
      run.set(in(), hidden);
    } else {
      run.set_gradient(in(), input_gradient(run, dy, d_adapted));
    }
    if (reads_input())
      run.weight_gradient(in(), [this, sums = run.sums(), dy, d_adapted](const Tensor& x) {
        add_weight_gradient(sums, x, dy);
        add_first_gradients(sums, x, d_adapted);
      });
    if (trains_second_factors())
      run.weight_gradient([this, sums = run.sums(), dy, made = run.take_kept(adapted())] {
        add_second_gradients(sums, made, dy);
      });
    if (trains_biases()) run.weight_gradient([this, sums = run.sums(), dy] { add_bias_gradient(sums, dy); });
  }
};

class WholeLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out());
    const Tensor dx = input_gradient(run, dy, {});  // has no adapters
    run.weight_gradient(
        [this, sums = run.sums(), x = run.take_kept(in()), dy] { add_weight_gradient(sums, x, dy); });
    run.add_gradient(in(), dx);
  }
};

class ColumnLinearOp final : public LinearOp {
 public:
  using LinearOp::LinearOp;

 protected:
  void run_backward(BlockRun& run) const override {
    std::shared_ptr<InputAgain> x;
    if (reads_input()) {
      x = std::make_shared<InputAgain>(run.tensor_parallel(), run.take_kept(in()), run.rows());
      if (run.when() == Weights::now) x->begin();  // it travels beside the next product
    }
    InFlight entering;
    Tensor behind_sum;
    {
      const Tensor dy = run.take_gradient(out()), d_adapted = adapter_gradients(run, dy),
                   made = trains_second_factors() ? run.take_kept(adapted()) : Tensor();
      entering = run.tensor_parallel().enter_backward(input_gradient(run, dy, d_adapted), run.rows());
      if (x || made.defined() || trains_biases())
        run.weight_gradient([this, sums = run.sums(), x, dy, d_adapted, made] {
          if (x) {
            add_weight_and_bias_gradients(sums, x->whole(), dy);
            add_first_gradients(sums, x->whole(), d_adapted);
          } else {
            add_bias_gradient(sums, dy);
          }
          if (made.defined()) add_second_gradients(sums, made, dy);
        });
      x.reset();
      if (adds_behind_sum()) behind_sum = d_adapted;
    }
    const Tensor dx = run.rounded(entering.get());
    if (adds_behind_sum()) {
      const Range here = run.tensor_parallel().rows_here(run.rows());
      add_adapted_gradient(run, behind_sum.row_range(here.begin, here.end), dx);
    }
    run.add_gradient(in(), dx);
  }
};

}  // namespace

std::unique_ptr<OpRunner> make_linear_op(const BlockOp& op, const OpSetting& s) {
  if (op.weights.front().shard_dim < 0) return std::make_unique<WholeLinearOp>(op, s);
  const bool by_columns = op.weights.front().shard_dim == (op.order == WeightOrder::in_out ? 1 : 0);
  if (by_columns) return std::make_unique<ColumnLinearOp>(op, s);
  return std::make_unique<RowLinearOp>(op, s);
}

}  // namespace echelon
