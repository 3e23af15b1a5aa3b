// LFM2's gated short convolution (https://arxiv.org/abs/2511.23404) on the channels of this tp rank and,
// under context parallelism, of this cp rank; it restarts at each document. Its input is kept; the backward
// pass recomputes the output, beside the gradients, for the next product.
#include <optional>
#include <utility>

#include "model/op.h"
#include "parallel/channel_exchange.h"

namespace echelon {
namespace {

class ShortConvOp final : public OpRunner {
 public:
  ShortConvOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op), taps_(s.stacked(op.weights)), here_{0, taps_.value.rows()} {
    const int cp = s.rank.size(Axis::cp);
    if (cp == 1) return;
    exchange_.emplace(s.rank, s.plan);
    const std::int64_t all = taps_.value.rows(), each = all / cp;
    for (int r = 0; r < cp; ++r) {
      const Range channels{r * each, (r + 1) * each};
      made_.push_back({channels});
      given_.push_back({channels,
                        {all + channels.begin, all + channels.end},
                        {2 * all + channels.begin, 2 * all + channels.end}});
    }
    here_ = made_[static_cast<std::size_t>(s.rank.coordinate(Axis::cp))].front();
  }

 protected:
  void run_forward(BlockRun& run) const override {
    if (run.cache().tail.defined()) return generate(run);
    take_in(run);
    run.set(out(1), convolved(run, run.value(out(0))));
  }

  // The output comes of the backward pass, but where the next product is made again too.
  void run_again(BlockRun& run) const override {
    if (!run.value(out(0)).defined()) take_in(run);
    if (run.is_taken(out(1))) run.set(out(1), convolved(run, run.value(out(0))));
  }

  void run_backward(BlockRun& run) const override {
    Kernels& k = run.kernels();
    const SequenceRows rows = run.whole_sequences();
    const Tensor core = run.take_kept(out(0)), d_core = run.activation({core.rows(), core.cols()});
    Tensor dy = run.take_gradient(out(1));
    if (exchange_) dy = exchange_->to_channels(dy, made_);
    {
      const Tensor y = run.activation({dy.rows(), dy.cols()});
      k.short_convolution_backward(core, part_of(taps_, 0, here_).value, dy, rows, d_core, y);
      if (run.is_awaited(out(1))) run.provide(out(1), to_tokens(run, y, made_));
    }
    run.set_gradient(in(), to_tokens(run, d_core, given_));
    if (!taps_.gradient.defined()) return;
    run.weight_gradient([this, &k, sums = run.sums_of_whole_sequences(), core, dy, rows] {
      add_taps(k, sums, core, dy, rows);
      if (sums.by_sequence()) fill_others(k, taps_, 0, here_);
    });
  }

 private:
  void take_in(BlockRun& run) const {
    Tensor given = run.take(in());
    run.set(out(0), exchange_ ? exchange_->to_channels(given, given_) : std::move(given));
  }
  Tensor convolved(const BlockRun& run, const Tensor& core) const {
    const Tensor y = run.activation({core.rows(), here_.size()});
    run.kernels().short_convolution(core, part_of(taps_, 0, here_).value, run.whole_sequences(), y);
    return to_tokens(run, y, made_);
  }
  Tensor to_tokens(const BlockRun& run, const Tensor& of_channels, const ExchangedColumns& columns) const {
    if (!exchange_) return of_channels;
    const std::int64_t parts = of_channels.cols() / here_.size();
    const Tensor x = run.activation({run.rows(), parts * taps_.value.rows()});
    exchange_->to_tokens(of_channels, columns, x);
    return x;
  }

  void add_taps(Kernels& k, const SequenceSums& sums, const Tensor& core, const Tensor& dy,
                const SequenceRows& all) const {
    const Weight taps = part_of(taps_, 0, here_);
    const Weight* const one[] = {&taps};
    sums.add(one, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
      if (!onto) k.fill(gradients[0], 0.0);
      SequenceRows some{all.length == 0 ? 0 : rows.size() / all.length, all.length};
      if (all.first_positions.defined())
        some.first_positions = all.first_positions.flat_range(rows.begin, rows.end);
      k.short_convolution_backward_weight(core.row_range(rows.begin, rows.end),
                                          dy.row_range(rows.begin, rows.end), some, gradients[0]);
    });
  }

  // New tokens are convolved behind the last ones of the cache.
  void generate(BlockRun& run) const {
    Kernels& k = run.kernels();
    const Tensor given = run.take(in()), tail = run.cache().tail;
    if (run.position() == 0) k.fill(tail, 0.0);
    const std::int64_t before = tail.rows(), all = before + run.rows();
    const Tensor core = run.activation({all, given.cols()}), y = run.activation({all, taps_.value.rows()});
    k.copy(tail, core.row_range(0, before));
    k.copy(given, core.row_range(before, all));
    k.copy(core.row_range(all - before, all), tail);
    k.short_convolution(core, taps_.value, {1, all, {}}, y);
    run.set(out(1), y.row_range(before, all));
  }

  Weight taps_;
  Range here_;                               // of this tp rank's channels those that this cp rank has
  std::optional<ChannelExchange> exchange_;  // where the cp group has several ranks
  ExchangedColumns given_, made_;            // of [B | C | x], and of what they become
};

}  // namespace

std::unique_ptr<OpRunner> make_short_conv_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<ShortConvOp>(op, s);
}

}  // namespace echelon
