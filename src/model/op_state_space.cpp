// Mamba-2's convolution and scan (Dao & Gu 2024, https://arxiv.org/abs/2405.21060), or those of the gated
// delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464) with its norm, on the heads of this tp rank
// and, under context parallelism, of this cp rank; they restart at each document. Their input is kept; the
// backward pass recomputes the convolution and the states, beside the gradients.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "model/op.h"
#include "parallel/state_space_exchange.h"

namespace echelon {

StateSpaceShape state_space_here(const Plan& plan) {
  const StateSpaceSpec& s = plan.model.state_space;
  const int tp = plan.mesh.size(Axis::tp);
  return {.heads = s.heads / tp,
          .head_dim = s.head_dim,
          .groups = std::max<std::int64_t>(s.groups / tp, 1),
          .state = s.state,
          .chunk = s.chunk,
          .delta = s.is_delta(),
          .norm_eps = s.is_delta() ? plan.model.norm_eps : 0};
}

namespace {

// The rows of a weight that some heads use.
struct UsedWeight {
  Weight whole;
  std::vector<Range> rows;
  bool defined() const { return whole.defined(); }
  Weight used(std::size_t i = 0) const { return defined() ? part_of(whole, 0, rows[i]) : Weight(); }
  // Fills the gradient of all other rows with -0.0, which changes no sum.
  void fill_others(Kernels& kernels) const {
    if (!defined() || !whole.gradient.defined()) return;
    std::int64_t begin = 0;
    const auto fill = [&](std::int64_t end) {
      if (end > begin) kernels.fill(part_of(whole, 0, {begin, end}).gradient, -0.0);
    };
    for (const Range& range : rows) {
      fill(range.begin);
      begin = range.end;
    }
    fill(whole.value.dim(0));
  }
};

// What some heads compute with: their columns of [z | x | B | C | dt], followed by beta for the delta rule,
// and their weights. `d` is used whole if it is the norm's weight.
struct ScannedHeads {
  StateSpaceShape shape;       // without rows
  UsedWeight taps, conv_bias;  // one run of rows, or one each for x, B and C
  UsedWeight dt_bias, a_log, d;

  std::int64_t columns() const {
    return shape.width() + shape.mixed_width() + (shape.delta ? 2 : 1) * shape.heads;
  }
  Tensor z(const Tensor& given) const { return given.column_range(0, shape.width()); }
  Tensor mixed(const Tensor& given) const {
    return given.column_range(shape.width(), shape.width() + shape.mixed_width());
  }
  Tensor dt(const Tensor& given) const {
    const std::int64_t begin = shape.width() + shape.mixed_width();
    return given.column_range(begin, begin + shape.heads);
  }
  Tensor beta(const Tensor& given) const {
    return shape.delta ? given.column_range(columns() - shape.heads, columns()) : Tensor();
  }

  // Calls visit(weight, bias, columns(x)) for each run of rows.
  template <class Visit>
  void each_convolution(const Visit& visit) const {
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < taps.rows.size(); ++i) {
      const std::int64_t end = begin + taps.rows[i].size();
      visit(taps.used(i), conv_bias.used(i),
            [begin, end](const Tensor& x) { return x.column_range(begin, end); });
      begin = end;
    }
  }
  Tensor convolved(const BlockRun& run, const Tensor& x, const SequenceRows& rows) const {
    const Tensor y = run.statistic({x.rows(), x.cols()});
    each_convolution([&](const Weight& w, const Weight& bias, const auto& of) {
      run.kernels().convolve(of(x), w.value, bias.value, rows, of(y));
    });
    return y;
  }
  StateSpaceTensors tensors(const Tensor& given, const Tensor& convolved) const {
    return {z(given),           convolved,      dt(given),  dt_bias.used().value,
            a_log.used().value, d.used().value, beta(given)};
  }
  // `state`: the state to continue from, or undefined.
  Tensor scan(const BlockRun& run, const Tensor& given, const Tensor& convolved, const SequenceRows& rows,
              const Tensor& state) const {
    const Tensor y = run.activation({given.rows(), shape.width()});
    const StateSpaceShape of = with(rows);
    run.kernels().state_space(tensors(given, convolved), of, run.statistic({of.workspace(false)}), state, y);
    return y;
  }
  StateSpaceShape with(const SequenceRows& rows) const {
    StateSpaceShape of = shape;
    of.rows = rows;
    return of;
  }
};

class StateSpaceOp final : public OpRunner {
 public:
  StateSpaceOp(const BlockOp& op, const OpSetting& s) : OpRunner(op) {
    const StateSpaceShape shape = state_space_here(s.plan);
    const Range heads{0, shape.heads}, mixed{0, shape.mixed_width()};
    const auto of_heads = [&](std::ptrdiff_t from_end) {
      return UsedWeight{s.stacked({*(op.biases.end() - from_end)}), {heads}};
    };
    all_ = {shape, {s.stacked(op.weights), {mixed}}, {}, of_heads(3), of_heads(2), of_heads(1)};
    if (shape.delta) all_.d.rows = {{0, shape.head_dim}};
    if (op.biases.size() > 3)
      all_.conv_bias = {s.stacked({op.biases.begin(), op.biases.begin() + 3}), {mixed}};
    here_ = all_;
    if (s.rank.size(Axis::cp) == 1) return;
    exchange_.emplace(s.rank, s.plan, shape);
    here_.shape = exchange_->here();
    here_.taps.rows = here_.conv_bias.rows = exchange_->mixed();
    here_.dt_bias.rows = here_.a_log.rows = {exchange_->heads()};
    if (!shape.delta) here_.d.rows = here_.a_log.rows;
  }

 protected:
  void run_forward(BlockRun& run) const override {
    if (run.cache().state.defined()) return generate(run);
    const Tensor given = run.take(in());
    run.set(out(0), exchange_ ? exchange_->to_heads(given) : given);
    scan(run);
  }

  void run_again(BlockRun& run) const override {
    if (run.value(out(0)).defined())
      scan(run);
    else
      run_forward(run);
  }

  void run_backward(BlockRun& run) const override {
    Kernels& k = run.kernels();
    const SequenceRows rows = run.whole_sequences();
    const StateSpaceShape shape = here_.with(rows);
    const std::int64_t heads = shape.heads;
    const Tensor core = run.take_kept(out(0)), x = here_.mixed(core),
                 d_core = run.activation({core.rows(), core.cols()}),
                 d_mixed = run.statistic({core.rows(), shape.mixed_width()}),
                 terms = run.statistic({core.rows(), shape.terms()});
    {
      Tensor dy = run.take_gradient(out(1));
      if (exchange_) dy = exchange_->output_gradient_to_heads(dy);
      k.state_space_backward(here_.tensors(core, here_.convolved(run, x, rows)), shape, dy,
                             run.statistic({shape.workspace(true)}),
                             {here_.z(d_core), d_mixed, here_.dt(d_core), terms, here_.beta(d_core)});
    }
    here_.each_convolution([&](const Weight& w, const Weight& bias, const auto& of) {
      k.convolve_backward(of(x), w.value, bias.value, rows, of(d_mixed), of(here_.mixed(d_core)));
    });
    run.set_gradient(in(), to_tokens(run, d_core));
    run.weight_gradient([this, &k, sums = run.sums_of_whole_sequences(), x, d_mixed, terms, heads, rows] {
      here_.each_convolution([&](const Weight& w, const Weight& bias, const auto& of) {
        add_taps(k, sums, w, of(x), of(d_mixed), rows);
        if (bias.defined()) sums.add_bias(bias, of(d_mixed));
      });
      sums.add_bias(here_.dt_bias.used(), terms.column_range(0, heads));
      sums.add_bias(here_.a_log.used(), terms.column_range(heads, 2 * heads));
      sums.add_bias(here_.d.used(), terms.column_range(2 * heads, terms.cols()));
      if (!sums.by_sequence()) return;
      for (const UsedWeight* weight : {&here_.taps, &here_.conv_bias, &here_.dt_bias, &here_.a_log, &here_.d})
        weight->fill_others(k);
    });
  }

 private:
  void scan(BlockRun& run) const {
    const Tensor core = run.value(out(0));
    const SequenceRows rows = run.whole_sequences();
    Tensor y = here_.scan(run, core, here_.convolved(run, here_.mixed(core), rows), rows, {});
    if (exchange_) {
      const Tensor made = std::exchange(y, run.activation({run.rows(), all_.shape.width()}));
      exchange_->output_to_tokens(made, y);
    }
    run.set(out(1), y);
  }
  Tensor to_tokens(const BlockRun& run, const Tensor& d_core) const {
    if (!exchange_) return d_core;
    const Tensor d_given = run.activation({run.rows(), all_.columns()});
    exchange_->gradient_to_tokens(d_core, d_given);
    return d_given;
  }

  static void add_taps(Kernels& k, const SequenceSums& sums, const Weight& taps, const Tensor& x,
                       const Tensor& dy, const SequenceRows& all) {
    const Weight* const one[] = {&taps};
    sums.add(one, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
      if (!onto) k.fill(gradients[0], 0.0);
      SequenceRows some{all.length == 0 ? 0 : rows.size() / all.length, all.length};
      if (all.first_positions.defined())
        some.first_positions = all.first_positions.flat_range(rows.begin, rows.end);
      k.convolve_backward_weight(x.row_range(rows.begin, rows.end), dy.row_range(rows.begin, rows.end), some,
                                 gradients[0]);
    });
  }

  // New tokens are convolved with the last ones from the cache, and continue from its state.
  void generate(BlockRun& run) const {
    Kernels& k = run.kernels();
    const BlockCache& cache = run.cache();
    if (run.position() == 0) {
      k.fill(cache.tail, 0.0);
      k.fill(cache.state, 0.0);
    }
    const Tensor given = run.take(in());
    const std::int64_t before = cache.tail.rows(), all = before + run.rows();
    const Tensor x = run.activation({all, all_.shape.mixed_width()});
    k.copy(cache.tail, x.row_range(0, before));
    k.copy(all_.mixed(given), x.row_range(before, all));
    k.copy(x.row_range(all - before, all), cache.tail);
    const Tensor made = all_.convolved(run, x, {1, all, {}});
    run.set(out(1), all_.scan(run, given, made.row_range(before, all), {1, run.rows(), {}}, cache.state));
  }

  ScannedHeads all_, here_;                     // of this tp rank; those that this cp rank scans
  std::optional<StateSpaceExchange> exchange_;  // if the cp group has several ranks
};

}  // namespace

std::unique_ptr<OpRunner> make_state_space_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<StateSpaceOp>(op, s);
}

}  // namespace echelon
