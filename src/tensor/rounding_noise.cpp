#include "tensor/rounding_noise.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensor/reference_view.h"

namespace echelon {

// Roundings of the n - 1 partial sums of terms t of any sign: each is uniform within half a unit of a sum of
// size t sqrt(k), so that they come to t n / sqrt(2 * 12) units; terms each off by d units come to d t
// sqrt(n). Two operands are moved, so d = sqrt(n) / sqrt(2 * 2 * 12), rounded up to sqrt(n / 32).
double RoundingNoise::units(std::int64_t terms) { return std::sqrt(1 + static_cast<double>(terms) / 32); }

// SplitMix64 (Steele et al. 2014), a bit for each element.
double RoundingNoise::sign() {
  if (left_ == 0) {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    bits_ = z ^ (z >> 31);
    left_ = 64;
  }
  --left_;
  const double sign = (bits_ & 1) != 0 ? 1 : -1;
  bits_ >>= 1;
  return sign;
}

template <class Each>
void RoundingNoise::visit(const Tensor& t, const Each& each) {
  if (!on_ || !t.defined() || t.numel() == 0) return;
  if (t.dtype() == DType::bf16 && !moves_narrow_) return;
  with_stored_type(t, [&]<class F>(F) {
    const Matrix<F> x(t);
    for (std::int64_t i = 0; i < x.rows; ++i)
      for (std::int64_t j = 0; j < x.cols; ++j)
        x[i][j] =
            static_cast<F>(each(static_cast<double>(x[i][j]), double{std::numeric_limits<F>::epsilon()}));
  });
}

void RoundingNoise::move(const Tensor& x, std::int64_t terms) {
  // What sums of bf16 are off by in f32 is far below a unit of bf16.
  const double size = x.dtype() == DType::bf16 ? 1 : units(terms);
  visit(x, [&](double value, double epsilon) { return value + sign() * size * epsilon * value; });
}

Tensor RoundingNoise::moved(const Tensor& x, std::int64_t terms) {
  if (!on_ || !x.defined() || x.numel() == 0) return x;
  const Tensor copy(arena_, MemoryCategory::other, x.dtype(), x.shape());
  exact_.copy(x, copy);
  move(copy, terms);
  return copy;
}

Tensor RoundingNoise::moved_logarithms(const Tensor& x) {
  if (!on_ || !x.defined() || x.numel() == 0) return x;
  const Tensor copy(arena_, MemoryCategory::other, x.dtype(), x.shape());
  exact_.copy(x, copy);
  visit(copy, [&](double value, double epsilon) {
    return std::isfinite(value) ? value + sign() * epsilon * (1 + std::abs(value)) : value;
  });
  return copy;
}

void RoundingNoise::matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c,
                           bool accumulate) {
  const std::int64_t terms = ta == Transpose::yes ? a.rows() : a.cols();
  exact_.matmul(moved(a, terms), ta, moved(b, terms), tb, c, accumulate);
  move(c, terms);
}

void RoundingNoise::grouped_matmul(std::span<const MatrixProduct> products) {
  if (!on_) return exact_.grouped_matmul(products);
  for (const MatrixProduct& p : products)
    if (p.c.numel() > 0) matmul(p.a, p.ta, p.b, p.tb, p.c, p.accumulate);
}

void RoundingNoise::add(const Tensor& x, InOut y) {
  exact_.add(moved(x), y);
  move(y);
}

void RoundingNoise::scale(InOut x, double factor) {
  exact_.scale(x, factor);
  move(x);
}

void RoundingNoise::sum_squares(const Tensor& x, std::int64_t block, Out sums) {
  exact_.sum_squares(moved(x), block, sums);
}

void RoundingNoise::add_bias(const Tensor& bias, InOut y) {
  exact_.add_bias(moved(bias), y);
  move(y);
}

void RoundingNoise::residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out) {
  exact_.residual(moved(x), moved(y), moved(bias), out);
  move(out);
}

void RoundingNoise::bias_gradient(const Tensor& dy, InOut dbias) {
  exact_.bias_gradient(moved(dy, dy.rows()), dbias);
  move(dbias, dy.rows());
}

void RoundingNoise::layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y,
                               Out stats) {
  exact_.layer_norm(moved(x, x.cols()), moved(w), moved(b), eps, y, stats);
  move(y);
  move(stats);
}

void RoundingNoise::layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats,
                                     Out y) {
  exact_.layer_norm_again(moved(x), moved(w), moved(b), moved(stats), y);
  move(y);
}

void RoundingNoise::layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w,
                                              const Tensor& stats, InOut dx) {
  exact_.layer_norm_backward_input(moved(dy, x.cols()), moved(x, x.cols()), moved(w), moved(stats), dx);
  move(dx);
}

void RoundingNoise::layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats,
                                               InOut dw, InOut db) {
  exact_.layer_norm_backward_weight(moved(dy, x.rows()), moved(x, x.rows()), moved(stats), dw, db);
  move(dw, x.rows());
  move(db, x.rows());
}

void RoundingNoise::rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats) {
  exact_.rms_norm(moved(x, x.cols()), moved(w), eps, y, stats);
  move(y);
  move(stats);
}

void RoundingNoise::rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y) {
  exact_.rms_norm_again(moved(x), moved(w), moved(stats), y);
  move(y);
}

void RoundingNoise::rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w,
                                            const Tensor& stats, InOut dx) {
  exact_.rms_norm_backward_input(moved(dy, x.cols()), moved(x, x.cols()), moved(w), moved(stats), dx);
  move(dx);
}

void RoundingNoise::rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats,
                                             InOut dw) {
  exact_.rms_norm_backward_weight(moved(dy, x.rows()), moved(x, x.rows()), moved(stats), dw);
  move(dw, x.rows());
}

void RoundingNoise::activate(Activation a, InOut h, const Tensor& bias, Out y) {
  if (!on_) return exact_.activate(a, h, bias, y);
  if (bias.defined()) add_bias(bias, h);
  move(h);
  exact_.activate(a, h, {}, y);
  move(y);
}

void RoundingNoise::activate_backward(Activation a, InOut h, InOut dy) {
  move(h);
  move(dy);
  exact_.activate_backward(a, h, dy);
  move(h);
  move(dy);
}

void RoundingNoise::swiglu(const Tensor& gate_up, Out y) {
  exact_.swiglu(moved(gate_up), y);
  move(y);
}

void RoundingNoise::swiglu_backward(InOut gate_up, InOut dy) {
  move(gate_up);
  move(dy);
  exact_.swiglu_backward(gate_up, dy);
  move(gate_up);
  move(dy);
}

void RoundingNoise::weighted_swiglu_backward(InOut gate_up, InOut dy, const Tensor& weights, Out dweights) {
  move(gate_up);
  move(dy, dy->cols());
  exact_.weighted_swiglu_backward(gate_up, dy, moved(weights), dweights);
  move(gate_up);
  move(dy);
  move(dweights, dy->cols());
}

void RoundingNoise::rope(InOut x, std::int64_t head_dim, const Tensor& positions, double theta,
                         bool inverse) {
  move(x);
  exact_.rope(x, head_dim, positions, theta, inverse);
  move(x);
}

void RoundingNoise::attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                              Out out, Out lse) {
  exact_.attention(moved(q, shape.head_dim), moved(k, shape.head_dim), moved(v, shape.kv_len), shape, out,
                   lse);
  move(out, shape.kv_len);
  if (on_) exact_.copy(moved_logarithms(lse), lse);
}

void RoundingNoise::attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                                    Out delta) {
  exact_.attention_delta(moved(out, shape.head_dim), moved(dout, shape.head_dim), shape, delta);
  move(delta, shape.head_dim);
}

void RoundingNoise::attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                                       const Tensor& lse, const Tensor& delta, const AttentionShape& shape,
                                       Out dq, Out dk, Out dv) {
  const std::int64_t terms = std::max(shape.head_dim, std::max(shape.kv_len, shape.q_len));
  exact_.attention_backward(moved(q, terms), moved(k, terms), moved(v, terms), moved(dout, terms),
                            moved_logarithms(lse), moved(delta), shape, dq, dk, dv);
  move(dq, terms);
  move(dk, terms);
  move(dv, terms);
}

void RoundingNoise::embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id,
                                       InOut dtable) {
  exact_.embedding_backward(ids, moved(dy, dy.rows()), first_id, dtable);
  move(dtable);
}

void RoundingNoise::combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y) {
  exact_.combine_rows(moved(x), places, moved(weights), y);
  move(y);
}

void RoundingNoise::exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id,
                            Out sum, Out target) {
  move(logits);
  exact_.exp_sum(logits, max, targets, first_id, sum, target);
  move(logits);
  move(sum, logits->cols());
  move(target);
}

void RoundingNoise::cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                                           std::int64_t first_id, double loss_scale, Out dlogits) {
  Tensor off = p;
  if (p.begins_with(dlogits))
    move(off);
  else
    off = moved(p);
  exact_.cross_entropy_backward(off, moved(sum), targets, first_id, loss_scale, dlogits);
  move(dlogits);
}

void RoundingNoise::adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, Out rounded) {
  exact_.adamw(p, moved(g), m, v, step);
  move(p);
  move(m);
  move(v);
  if (rounded->defined()) exact_.copy(p, rounded);
}

}  // namespace echelon
