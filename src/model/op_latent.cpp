// Heads of multi-head latent attention, from their compressed forms (DeepSeek-V2,
// https://arxiv.org/abs/2405.04434, section 2.1): queries, and each head's key without rotary positions and
// its value. The rotary part of the key is shared by all heads, and each gets a copy. It comes first, while
// transformers has it last, which makes no difference to the product of queries and keys. Attention's heads
// have a single width, so narrower values are padded with zeros.
#include "model/op.h"
#include "spec/sum_blocks.h"
#include "tensor/layer_products.h"
#include "tensor/sum_by_blocks.h"

namespace echelon {
namespace {

Tensor head(const Tensor& x, std::int64_t h, std::int64_t width, std::int64_t begin, std::int64_t end) {
  return x.column_range(h * width + begin, h * width + end);
}

class LatentOp final : public OpRunner {
 public:
  LatentOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        heads_(heads_here(s.plan.model, s.tensor_parallel)),
        turned_(s.plan.model.rotary_dim),
        value_(s.plan.model.value_head_dim),
        kv_(s.stacked({op.weights.back()})),
        formats_(s.plan.precision) {
    if (op.inputs.size() == 1) q_ = s.stacked({op.weights.front()});
    if (s.plan.numerics == Numerics::ordinary) return;
    const int tp = s.tensor_parallel.size(), index = s.tensor_parallel.index();
    if (q_.defined()) query_blocks_ = sum_blocks({op.weights.front()}, tp, index);
    kv_blocks_ = sum_blocks({op.weights.back()}, tp, index);
  }

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take_input(op()), qkv = run.activation({run.rows(), heads_.qkv_width()});
    Kernels& k = run.kernels();
    if (value_ < heads_.head_dim()) k.fill(qkv, 0.0);
    {
      const Tensor q = q_.defined() ? product(run, queries(x), q_) : run.take(in(1));
      each_query(heads_.q(qkv), q, [&](const Tensor& here, const Tensor& there) { k.copy(there, here); });
    }
    const Tensor kv = product(run, keys_and_values(x), kv_);
    each_key_and_value(qkv, kv, [&](const Tensor& here, const Tensor& there) { k.copy(there, here); });
    for (std::int64_t h = 0; h < heads_.num_heads(); ++h) k.copy(turned_key(x), turned_key_of(qkv, h));
    run.set(out(), qkv);
  }

  void run_backward(BlockRun& run) const override {
    Kernels& k = run.kernels();
    const auto x = std::make_shared<InputAgain>(run.tensor_parallel(), run.take_kept(in()), run.rows());
    if (run.when() == Weights::now) x->begin();
    const Tensor dq = run.activation({run.rows(), heads_.width()}),
                 dkv = run.activation({run.rows(), kv_.value.rows()}),
                 dx = run.partial_sum({run.rows(), first_key() + kv_.value.cols() + turned_});
    {
      const Tensor d_qkv = run.take_gradient(out());
      each_query(heads_.q(d_qkv), dq, [&](const Tensor& here, const Tensor& there) { k.copy(here, there); });
      each_key_and_value(d_qkv, dkv, [&](const Tensor& here, const Tensor& there) { k.copy(here, there); });
      add_turned_keys(run, d_qkv, turned_key(dx));
    }
    const auto input_gradient = [&](const Tensor& dy, const Weight& w, const Tensor& to,
                                    const SumBlocks& blocks) {
      multiply(k, {dy, Transpose::no, w.value, Transpose::no, to, false, blocks}, formats_.of_input());
    };
    if (q_.defined()) input_gradient(dq, q_, queries(dx), query_blocks_);
    input_gradient(dkv, kv_, keys_and_values(dx), kv_blocks_);
    InFlight entering = run.tensor_parallel().enter_backward(dx, run.rows());
    run.weight_gradient([this, sums = run.sums(), x, dq, dkv] {
      if (q_.defined()) sums.add_product(q_, dq, queries(x->whole()), formats_.of_weight());
      sums.add_product(kv_, dkv, keys_and_values(x->whole()), formats_.of_weight());
    });
    if (!q_.defined()) run.set_gradient(in(1), dq);
    run.add_gradient(in(), run.rounded(entering.get()));
  }

 private:
  Tensor product(BlockRun& run, const Tensor& x, const Weight& weight) const {
    const Tensor y = run.activation({run.rows(), weight.value.rows()});
    multiply(run.kernels(), {x, Transpose::no, weight.value, Transpose::yes, y}, formats_.forward());
    return y;
  }

  // The gradients of all heads' copies of a turned key.
  void add_turned_keys(const BlockRun& run, const Tensor& d_qkv, const Tensor& sum) const {
    Kernels& k = run.kernels();
    const auto add_heads = [&](Range heads, const Tensor& to) {
      k.copy(turned_key_of(d_qkv, heads.begin), to);
      for (std::int64_t h = heads.begin + 1; h < heads.end; ++h) k.add(turned_key_of(d_qkv, h), to);
    };
    if (kv_blocks_.empty()) return add_heads({0, heads_.num_heads()}, sum);
    const auto room = [&] { return run.statistic({sum.rows(), sum.cols()}); };
    const std::int64_t of_head = kv_.value.rows() / heads_.num_heads();
    const Tensor wide = room();
    sum_by_blocks(k, std::ssize(kv_blocks_), wide, room, [&](std::int64_t b, const Tensor& to) {
      const Range rows = kv_blocks_[static_cast<std::size_t>(b)].front();
      add_heads({rows.begin / of_head, rows.end / of_head}, to);
    });
    k.copy(wide, sum);
  }

  // Columns of what is compressed.
  std::int64_t first_key() const { return q_.defined() ? q_.value.cols() : 0; }
  Tensor queries(const Tensor& x) const { return x.column_range(0, first_key()); }
  Tensor keys_and_values(const Tensor& x) const {
    return x.column_range(first_key(), first_key() + kv_.value.cols());
  }
  Tensor turned_key(const Tensor& x) const { return x.column_range(x.cols() - turned_, x.cols()); }
  Tensor turned_key_of(const Tensor& qkv, std::int64_t h) const {
    return head(heads_.k(qkv), h, heads_.head_dim(), 0, turned_);
  }

  // What belongs together of [q | k | v] and of what the products make.
  template <class Visit>
  void each_query(const Tensor& q, const Tensor& made, const Visit& visit) const {
    const std::int64_t width = heads_.head_dim();
    for (std::int64_t h = 0; h < heads_.num_heads(); ++h) {
      visit(head(q, h, width, 0, turned_), head(made, h, width, width - turned_, width));
      if (turned_ < width) visit(head(q, h, width, turned_, width), head(made, h, width, 0, width - turned_));
    }
  }
  template <class Visit>
  void each_key_and_value(const Tensor& qkv, const Tensor& made, const Visit& visit) const {
    const std::int64_t width = heads_.head_dim(), key = width - turned_, both = key + value_;
    for (std::int64_t h = 0; h < heads_.num_heads(); ++h) {
      if (key > 0) visit(head(heads_.k(qkv), h, width, turned_, width), head(made, h, both, 0, key));
      visit(head(heads_.v(qkv), h, width, 0, value_), head(made, h, both, key, both));
    }
  }

  Heads heads_;
  std::int64_t turned_, value_;  // of a head
  Weight q_, kv_;                // no q_ where queries are not compressed
  LayerFormats formats_;
  SumBlocks query_blocks_, kv_blocks_;  // of sums over heads, under invariant numerics
};

// What attention makes of values with zeros behind them, without these.
class NarrowOp final : public OpRunner {
 public:
  NarrowOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        heads_(heads_here(s.plan.model, s.tensor_parallel)),
        value_(s.plan.model.value_head_dim) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor x = run.take(in()), y = run.activation({run.rows(), heads_.num_heads() * value_});
    for (std::int64_t h = 0; h < heads_.num_heads(); ++h)
      run.kernels().copy(head(x, h, heads_.head_dim(), 0, value_), head(y, h, value_, 0, value_));
    run.set(out(), y);
  }
  void run_backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out()), dx = run.activation({run.rows(), heads_.width()});
    run.kernels().fill(dx, 0.0);
    for (std::int64_t h = 0; h < heads_.num_heads(); ++h)
      run.kernels().copy(head(dy, h, value_, 0, value_), head(dx, h, heads_.head_dim(), 0, value_));
    run.set_gradient(in(), dx);
  }

 private:
  Heads heads_;
  std::int64_t value_;
};

}  // namespace

std::unique_ptr<OpRunner> make_latent_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<LatentOp>(op, s);
}

std::unique_ptr<OpRunner> make_narrow_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<NarrowOp>(op, s);
}

}  // namespace echelon
