// A matrix product with a parameter: by columns, behind which each tp rank has its columns, or by rows,
// behind which each has a part of the sum, or with a whole one, for the rows that a rank has. Where it enters
// by columns, the sum of the input's gradient over tp is under way while the weight's gradient is computed.
// Adapters (spec/fine_tuning.h) stand beside the matrix.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "model/op.h"
#include "spec/sum_blocks.h"
#include "tensor/expert_products.h"
#include "tensor/layer_products.h"

namespace echelon {
namespace {

class LinearOp : public OpRunner {
 public:
  LinearOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        weights_(s.runs(op.weights)),
        biases_(s.runs(op.biases)),
        in_out_(op.order == WeightOrder::in_out),
        is_cut_(op.weights.front().shard_dim >= 0),
        formats_(s.plan.precision) {
    std::vector<std::int64_t> ends{0};  // of each matrix's columns
    for (const ParamSpec& spec : op.weights) ends.push_back(ends.back() + width(s.stacked({spec}), in_out_));
    for (const Adapter& adapter : op.adapters)
      adapters_.push_back(
          {s.stacked({adapter.a}), s.stacked({adapter.b}), {ends[adapter.weight], ends[adapter.weight + 1]}});
    if (s.plan.numerics == Numerics::invariant && is_cut_ && weights_.size() == 1)
      blocks_ = sum_blocks(op.weights, s.tensor_parallel.size(), s.tensor_parallel.index());
    by_columns_ = is_cut_ && op.weights.front().shard_dim == (in_out_ ? 1 : 0);
  }

 protected:
  void run_forward(BlockRun& run) const override {
    Tensor x = run.take_input(op());
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
    Kernels& k = run.kernels();
    const Tensor d = run.activation({run.rows(), rank() * std::ssize(adapters_)});
    each_adapter([&](const LowRank& l, Range inner) {
      k.matmul(columns_of(dy, l.columns), Transpose::no, l.b.value, Transpose::no, columns_of(d, inner),
               false);
    });
    k.scale(d, op().adapter_scale);
    return d;
  }

  // `d_adapted`: of adapter_gradients(). What follows is of one product.
  Tensor input_gradient(BlockRun& run, const Tensor& dy, const Tensor& d_adapted,
                        const Epilogue& epilogue = {}) const {
    const std::vector<std::int64_t> shape{dy.rows(), weights_.front().value.dim(in_out_ ? 0 : 1)};
    const Tensor dx = by_columns_ ? run.partial_sum(shape) : run.activation(shape);
    bool further = false;
    each_run(weights_, in_out_, dy, [&](const Weight& w, const Tensor& part) {
      multiply(run.kernels(),
               {part, Transpose::no, w.value, in_out_ ? Transpose::yes : Transpose::no, dx,
                std::exchange(further, true), by_columns_ ? blocks_ : SumBlocks()},
               formats_.of_input(), epilogue);
    });
    each_adapter([&](const LowRank& l, Range inner) {
      run.kernels().matmul(columns_of(d_adapted, inner), Transpose::no, l.a.value, Transpose::no, dx, true);
    });
    return dx;
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
      if (l.a.gradient.defined()) sums.add_product(l.a, columns_of(d_adapted, inner), x);
    });
  }

  // `made`: the value that the first factors made of the input.
  void add_second_gradients(const SequenceSums& sums, const Tensor& made, const Tensor& dy) const {
    each_adapter([&](const LowRank& l, Range inner) {
      if (l.b.gradient.defined()) sums.add_product(l.b, columns_of(dy, l.columns), columns_of(made, inner));
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
  };

  // Adds to y; returns what the first factors make of x, times the scale.
  Tensor add_adapters(BlockRun& run, const Tensor& x, const Tensor& y) const {
    Kernels& k = run.kernels();
    const Tensor made = run.activation({run.rows(), rank() * std::ssize(adapters_)});
    each_adapter([&](const LowRank& l, Range inner) {
      k.matmul(x, Transpose::no, l.a.value, Transpose::yes, columns_of(made, inner), false);
    });
    k.scale(made, op().adapter_scale);
    each_adapter([&](const LowRank& l, Range inner) {
      k.matmul(columns_of(made, inner), Transpose::no, l.b.value, Transpose::yes, columns_of(y, l.columns),
               true);
    });
    return made;
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

  std::vector<Weight> weights_, biases_;  // in runs: see OpSetting
  std::vector<LowRank> adapters_;
  bool in_out_;  // how the matrix is stored
  bool is_cut_, by_columns_ = false;
  LayerFormats formats_;
  SumBlocks blocks_;  // of sums over the dimension that is cut, under invariant numerics
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
    }
    run.add_gradient(in(), run.rounded(entering.get()));
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
