#include "tensor/rounding_noise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "tensor/reference_view.h"
#include "tensor/split_weights.h"

namespace echelon {
namespace {

// Whatever decides, and whatever only sums up, is computed exactly, by a HostBackend like the kernels that
// get noise.
class NoisyKernels final : public RoundingNoise {
 public:
  NoisyKernels(Kernels& exact, Arena& arena, double of_operands)
      : exact_(exact), arena_(arena), of_operands_(of_operands) {}

  void begin(std::uint64_t trial, bool narrow) override {
    on_ = true;
    moves_narrow_ = narrow;
    state_ = trial * 0xd1342543de82ef95;
    left_ = 0;
  }
  void end() override { on_ = false; }

  void fill(Out x, double value) override { exact_.fill(x, value); }
  void copy(const Tensor& from, Out to) override { exact_.copy(from, to); }
  bool all_finite(const Tensor& x) override { return exact_.all_finite(x); }
  void embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y) override {
    exact_.embedding(ids, table, first_id, y);
  }
  void row_max(const Tensor& logits, Out max) override { exact_.row_max(logits, max); }
  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate) override {
    const std::int64_t terms = ta == Transpose::yes ? a.rows() : a.cols();
    exact_.matmul(moved_operand(a, terms), ta, moved_operand(b, terms), tb, c, accumulate);
    move(c, terms);
  }

  void grouped_matmul(std::span<const MatrixProduct> products) override {
    if (!on_) return exact_.grouped_matmul(products);
    for (const MatrixProduct& p : products)
      if (p.c.numel() > 0) matmul(p.a, p.ta, p.b, p.tb, p.c, p.accumulate);
  }

  // Noise is added before rounding: a number near the middle between two fp8 values may become the other one.
  void round_to_fp8(const Tensor& x, Fp8 format, Out y) override { exact_.round_to_fp8(moved(x), format, y); }

  void add(const Tensor& x, InOut y) override {
    exact_.add(moved(x), y);
    move(y);
  }

  void scale(InOut x, double factor) override {
    exact_.scale(x, factor);
    move(x);
  }

  void sum_squares(const Tensor& x, std::int64_t block, Out sums) override {
    exact_.sum_squares(moved(x), block, sums);
  }

  void sum_in_order(const Tensor& x, std::int64_t block, Out sums) override {
    exact_.sum_in_order(x, block, sums);
  }

  void add_bias(const Tensor& bias, InOut y) override {
    exact_.add_bias(moved(bias), y);
    move(y);
  }

  void residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out) override {
    exact_.residual(moved(x), moved(y), moved(bias), out);
    move(out);
  }

  void bias_gradient(const Tensor& dy, InOut dbias) override {
    exact_.bias_gradient(moved(dy, dy.rows()), dbias);
    move(dbias, dy.rows());
  }

  void layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y, Out stats) override {
    exact_.layer_norm(moved(x, x.cols()), moved(w), moved(b), eps, y, stats);
    move(y);
    move(stats);
  }

  void layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats,
                        Out y) override {
    exact_.layer_norm_again(moved(x), moved(w), moved(b), moved(stats), y);
    move(y);
  }

  void layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                                 InOut dx) override {
    exact_.layer_norm_backward_input(moved(dy, x.cols()), moved(x, x.cols()), moved(w), moved(stats), dx);
    move(dx);
  }

  void layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw,
                                  InOut db) override {
    exact_.layer_norm_backward_weight(moved(dy, x.rows()), moved(x, x.rows()), moved(stats), dw, db);
    move(dw, x.rows());
    move(db, x.rows());
  }

  void rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats) override {
    exact_.rms_norm(moved(x, x.cols()), moved(w), eps, y, stats);
    move(y);
    move(stats);
  }

  void rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y) override {
    exact_.rms_norm_again(moved(x), moved(w), moved(stats), y);
    move(y);
  }

  void rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                               InOut dx) override {
    exact_.rms_norm_backward_input(moved(dy, x.cols()), moved(x, x.cols()), moved(w), moved(stats), dx);
    move(dx);
  }

  void rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw) override {
    exact_.rms_norm_backward_weight(moved(dy, x.rows()), moved(x, x.rows()), moved(stats), dw);
    move(dw, x.rows());
  }

  void row_squares(const Tensor& x, Out squares) override {
    exact_.row_squares(moved(x, x.cols()), squares);
    move(squares);
  }

  void rms_norm_of_squares(const Tensor& x, const Tensor& w, double eps, double columns, Out y,
                           InOut stats) override {
    exact_.rms_norm_of_squares(moved(x), moved(w), eps, columns, y, stats);
    move(y);
    move(stats);
  }

  void rms_norm_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                              Out sums) override {
    exact_.rms_norm_backward_sums(moved(dy, x.cols()), moved(x, x.cols()), moved(w), moved(stats), sums);
    move(sums);
  }

  void rms_norm_backward_input_of_sums(const Tensor& dy, const Tensor& x, const Tensor& w,
                                       const Tensor& stats, const Tensor& sums, double columns,
                                       InOut dx) override {
    exact_.rms_norm_backward_input_of_sums(moved(dy), moved(x), moved(w), moved(stats), moved(sums), columns,
                                           dx);
    move(dx);
  }

  void activate(Activation a, InOut h, const Tensor& bias, Out y) override {
    if (!on_) return exact_.activate(a, h, bias, y);
    if (bias.defined()) add_bias(bias, h);
    move(h);
    exact_.activate(a, h, {}, y);
    move(y);
  }

  void activate_backward(Activation a, InOut h, InOut dy) override {
    move(h);
    move(dy);
    exact_.activate_backward(a, h, dy);
    move(h);
    move(dy);
  }

  void xielu(const Tensor& h, const Tensor& alphas, Out y) override {
    exact_.xielu(moved(h), moved(alphas), y);
    move(y);
  }

  void xielu_backward(InOut h, const Tensor& alphas, InOut dy, Out dalphas) override {
    move(h);
    move(dy);
    exact_.xielu_backward(h, moved(alphas), dy, dalphas);
    move(h);
    move(dy);
    move(dalphas, dy->cols());
  }

  void gated(Activation a, const Tensor& gate_up, Out y, const SwigluClamp& clamp) override {
    exact_.gated(a, moved(gate_up), y, clamp);
    move(y);
  }

  void gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp) override {
    move(gate_up);
    move(dy);
    exact_.gated_backward(a, gate_up, dy, clamp);
    move(gate_up);
    move(dy);
  }

  void sigmoid_gate(const Tensor& x, const Tensor& gate, Out y) override {
    exact_.sigmoid_gate(moved(x), moved(gate), y);
    move(y);
  }

  void sigmoid_gate_backward(const Tensor& x, InOut gate, InOut dy, Out y) override {
    move(gate);
    move(dy);
    exact_.sigmoid_gate_backward(moved(x), gate, dy, y);
    move(gate);
    move(dy);
    move(y);
  }

  void weighted_activation_backward(Activation a, InOut gate_up, InOut dy, const Tensor& weights,
                                    Out dweights, const SwigluClamp& clamp) override {
    move(gate_up);
    move(dy, dy->cols());
    exact_.weighted_activation_backward(a, gate_up, dy, moved(weights), dweights, clamp);
    move(gate_up);
    move(dy);
    move(dweights, dy->cols());
  }

  void rope(InOut x, std::int64_t head_dim, const Tensor& positions, const RopeTurns& turns,
            bool inverse) override {
    move(x);
    exact_.rope(x, head_dim, positions, turns, inverse);
    move(x);
  }

  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse) override {
    exact_.attention(moved(q, shape.head_dim), moved(k, shape.head_dim), moved(v, shape.kv_len), shape, out,
                     lse);
    move(out, shape.kv_len);
    if (on_) exact_.copy(moved_logarithms(lse), lse);
  }

  void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                       Out delta) override {
    exact_.attention_delta(moved(out, shape.head_dim), moved(dout, shape.head_dim), shape, delta);
    move(delta, shape.head_dim);
  }

  void convolve(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                Out y) override {
    exact_.convolve(moved(x), moved(w), moved(bias), rows, y);
    move(y, w.cols());
  }

  void convolve_backward(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                         InOut dy, Out dx) override {
    exact_.convolve_backward(moved(x), moved(w), moved(bias), rows, dy, dx);
    move(dx, w.cols());
  }

  void convolve_backward_weight(const Tensor& x, const Tensor& dy, const SequenceRows& rows,
                                InOut dw) override {
    exact_.convolve_backward_weight(moved(x, x.rows()), moved(dy, x.rows()), rows, dw);
    move(dw);
  }

  void short_convolution(const Tensor& bcx, const Tensor& w, const SequenceRows& rows, Out y) override {
    exact_.short_convolution(moved(bcx), moved(w), rows, y);
    move(y, w.cols());
  }

  void short_convolution_backward(const Tensor& bcx, const Tensor& w, const Tensor& dy,
                                  const SequenceRows& rows, Out dbcx, Out y) override {
    exact_.short_convolution_backward(moved(bcx), moved(w), moved(dy), rows, dbcx, y);
    move(dbcx, w.cols());
    move(y, w.cols());
  }

  void short_convolution_backward_weight(const Tensor& bcx, const Tensor& dy, const SequenceRows& rows,
                                         InOut dw) override {
    exact_.short_convolution_backward_weight(moved(bcx, bcx.rows()), moved(dy, bcx.rows()), rows, dw);
    move(dw);
  }

  // Noise is added to its products one by one.
  void state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& workspace,
                   InOut state, Out y) override {
    HostBackend::state_space(moved(in), shape, workspace, state, y);
    move(y);
  }

  void state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& dy,
                            const Tensor& workspace, const StateSpaceGradients& out) override {
    HostBackend::state_space_backward(moved(in), shape, moved(dy), workspace, out);
    move(out.z);
    move(out.dt);
    if (out.beta.defined()) move(out.beta);
  }

  void attention_sink(const Tensor& sinks, const AttentionShape& shape, InOut out, InOut lse) override {
    exact_.attention_sink(moved(sinks), shape, out, lse);
    move(out);
    if (on_) exact_.copy(moved_logarithms(lse), lse);
  }

  void attention_sink_backward(const Tensor& sinks, const Tensor& lse, const Tensor& delta,
                               const AttentionShape& shape, InOut dsinks) override {
    exact_.attention_sink_backward(moved(sinks), moved_logarithms(lse), moved(delta), shape, dsinks);
    move(dsinks, shape.batch * shape.q_len);
  }

  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override {
    const std::int64_t terms = std::max(shape.head_dim, std::max(shape.kv_len, shape.q_len));
    exact_.attention_backward(moved(q, terms), moved(k, terms), moved(v, terms), moved(dout, terms),
                              moved_logarithms(lse), moved(delta), shape, dq, dk, dv);
    for (const Tensor* x : {dq.operator->(), dk.operator->(), dv.operator->()})
      if (x->defined()) move(*x, terms);
  }

  void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id, InOut dtable) override {
    exact_.embedding_backward(ids, moved(dy, dy.rows()), first_id, dtable);
    move(dtable);
  }

  void combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y) override {
    exact_.combine_rows(moved(x), places, moved(weights), y);
    move(y);
  }

  void soft_cap(InOut x, double cap) override {
    exact_.soft_cap(x, cap);
    move(x);
  }

  void exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
               Out target) override {
    move(logits);
    exact_.exp_sum(logits, max, targets, first_id, sum, target);
    move(logits);
    move(sum, logits->cols());
    move(target);
  }

  void cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                              std::int64_t first_id, double loss_scale, Out dlogits,
                              const LogitsCap& cap) override {
    Tensor off = p;
    if (p.begins_with(dlogits))
      move(off);
    else
      off = moved(p);
    exact_.cross_entropy_backward(off, moved(sum), targets, first_id, loss_scale, dlogits, cap);
    move(dlogits);
  }

  void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, InOut remainder) override {
    exact_.adamw(p, moved(g), m, v, step, remainder);
    remainder->defined() ? move_split(p, remainder) : move(p);
    move(m);
    move(v);
  }

  void momentum(const Tensor& g, InOut m, Out update, const MomentumStep& step) override {
    exact_.momentum(moved(g), m, update, step);
    move(m);
    move(update);
  }
  void step_weights(InOut p, const Tensor& update, const WeightStep& step, InOut remainder) override {
    exact_.step_weights(p, moved(update), step, remainder);
    remainder->defined() ? move_split(p, remainder) : move(p);
  }

 private:
  // The error of a sum of `terms` is as if each term were off by this many units in the last place: one for
  // the term itself, plus the random walk of the roundings of partial sums.
  //
  // Roundings of the n - 1 partial sums of terms t of any sign: each is uniform within half a unit of a sum
  // of size t sqrt(k), so that together they are t n / sqrt(2 * 12) units; terms that are each off by d units
  // give d t sqrt(n). Both operands get noise, so d = sqrt(n) / sqrt(2 * 2 * 12), rounded up to sqrt(n / 32).
  static double units(std::int64_t terms) { return std::sqrt(1 + static_cast<double>(terms) / 32); }

  // SplitMix64 (Steele et al. 2014), one bit for each element.
  float sign() {
    if (left_ == 0) {
      std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
      z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
      bits_ = z ^ (z >> 31);
      left_ = 64;
    }
    --left_;
    const float sign = static_cast<float>(bits_ & 1) * 2 - 1;
    bits_ >>= 1;
    return sign;
  }

  // x = each(x, epsilon), in double; for bf16 in float, which is faster and holds x (1 +- epsilon) exactly.
  template <class Each>
  void visit(const Tensor& t, const Each& each) {
    if (!on_ || !t.defined() || t.numel() == 0) return;
    if (t.dtype() == DType::bf16 && !moves_narrow_) return;
    with_stored_type(t, [&]<class F>(F) {
      using Number = std::conditional_t<std::is_same_v<F, bf16>, float, double>;
      const auto epsilon = static_cast<Number>(std::numeric_limits<F>::epsilon());
      const Matrix<F> x(t);
      for (std::int64_t i = 0; i < x.rows; ++i)
        for (std::int64_t j = 0; j < x.cols; ++j)
          x[i][j] = static_cast<F>(each(static_cast<Number>(x[i][j]), epsilon));
    });
  }

  // The same in place, for a result.
  void move(const Tensor& x, std::int64_t terms = 1) {
    // The error of bf16 sums in f32 is far below a unit of bf16.
    const double size = units(terms);
    visit(x, [&]<class Number>(Number value, Number epsilon) {
      if constexpr (std::is_same_v<Number, float>)
        return value + sign() * epsilon * value;
      else
        return value + sign() * size * epsilon * value;
    });
  }

  // Split weights are treated as the f32 numbers that they represent.
  void move_split(const Tensor& values, const Tensor& remainders) {
    if (!on_) return;
    std::vector<float> weights(static_cast<std::size_t>(values.numel()));
    join_weights(values, remainders, weights);
    move(Tensor::view_of(weights.data(), DType::f32, {values.numel()}));
    split_values(weights, values);
    split_remainders(weights, remainders);
  }

  // A copy of x with noise on every element: an operand of sums of `terms`.
  Tensor moved(const Tensor& x, std::int64_t terms = 1) {
    if (!on_ || !x.defined() || x.numel() == 0) return x;
    const Tensor copy(arena_, MemoryCategory::other, x.dtype(), x.shape());
    exact_.copy(x, copy);
    move(copy, terms);
    return copy;
  }

  StateSpaceTensors moved(const StateSpaceTensors& in) {
    return {moved(in.z),     moved(in.xbc), moved(in.dt),  moved(in.dt_bias),
            moved(in.a_log), moved(in.d),   moved(in.beta)};
  }

  Tensor moved_operand(const Tensor& x, std::int64_t terms) {
    const Tensor copy = moved(x, terms);
    if (of_operands_ > 0 && x.dtype() == DType::f32)
      visit(copy, [&](auto value, auto) { return value + sign() * of_operands_ * value; });
    return copy;
  }

  // For logarithms: noise of at least the unit of numbers near 1.
  Tensor moved_logarithms(const Tensor& x) {
    if (!on_ || !x.defined() || x.numel() == 0) return x;
    const Tensor copy(arena_, MemoryCategory::other, x.dtype(), x.shape());
    exact_.copy(x, copy);
    visit(copy, [&](auto value, auto epsilon) {
      return std::isfinite(value) ? value + sign() * epsilon * (1 + std::abs(value)) : value;
    });
    return copy;
  }

  Kernels& exact_;
  Arena& arena_;
  const double of_operands_;
  bool on_ = false, moves_narrow_ = true;
  std::uint64_t state_ = 0, bits_ = 0;
  int left_ = 0;  // of bits_
};

}  // namespace

std::shared_ptr<RoundingNoise> make_rounding_noise(Kernels& exact, Arena& arena, double of_operands) {
  return std::make_shared<NoisyKernels>(exact, arena, of_operands);
}

}  // namespace echelon
