#include "tensor/simd.h"

#include "base/error.h"

#include <cmath>
#include <limits>

// SSE4, AVX2 and AVX3 are enough on x86: each further target costs compile time and no pass here is faster
// for it. (Bits of HWY_AVX3_SPR, HWY_AVX3_ZEN4, HWY_AVX3_DL, HWY_SSSE3, HWY_SSE2: older versions lack some of
// the names.)
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS ((1LL << 4) | (1LL << 6) | (1LL << 7) | (1LL << 12) | (1LL << 14))
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Size = std::int64_t;
using Full = hn::ScalableTag<float>;
using One =
    hn::CappedTag<float, 1>;  // what is left of a row goes through the same code one element at a time
using hn::Add, hn::Div, hn::LoadU, hn::Mul, hn::MulAdd, hn::NegMulAdd, hn::Set, hn::StoreU, hn::Sub, hn::Zero;

constexpr float kLowest = std::numeric_limits<float>::lowest();

template <class D>
Size lanes(D d) {
  return static_cast<Size>(hn::Lanes(d));
}

// f(d, i) for each vector of the row.
template <class F>
HWY_INLINE void each(Size n, F f) {
  const Full d;
  Size i = 0;
  for (; i + lanes(d) <= n; i += lanes(d)) f(d, i);
  for (; i < n; ++i) f(One(), i);
}

// Sum of the vectors f(d, i): four running sums, so that additions need not wait for each other.
template <class F>
HWY_INLINE float sum_of(Size n, F f) {
  const Full d;
  const Size step = lanes(d);
  auto a = Zero(d), b = a, c = a, e = a;
  Size i = 0;
  for (; i + 4 * step <= n; i += 4 * step) {
    a = Add(a, f(d, i));
    b = Add(b, f(d, i + step));
    c = Add(c, f(d, i + 2 * step));
    e = Add(e, f(d, i + 3 * step));
  }
  for (; i + step <= n; i += step) a = Add(a, f(d, i));
  float rest = 0;
  for (; i < n; ++i) rest += hn::GetLane(f(One(), i));
  return hn::GetLane(hn::SumOfLanes(d, Add(Add(a, b), Add(c, e)))) + rest;
}

// e^x within 2 ulp for x in [-87, 88]; e^-87 = 1.6e-38 below that, NaN stays. Half the instructions of
// hn::Exp, which would take as long as a third of the matrix products of attention. x = n ln2 + r with |r| <=
// ln2 / 2, and e^x = 2^n e^r; the polynomial is the minimax one (3e-9) for e^r.
template <class D, class V>
HWY_INLINE V exponential(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V rounder =
      Set(d, 12582912.0f);  // 1.5 * 2^23: after adding it the low bits of the float are the integer n
  const V bounded = hn::Max(Set(d, -87.0f), x);
  const V shifted = MulAdd(bounded, Set(d, 1.44269504f), rounder);
  const V n = Sub(shifted, rounder);
  const V r = NegMulAdd(n, Set(d, -2.12194440e-4f), NegMulAdd(n, Set(d, 0.693359375f), bounded));
  V e = Set(d, 1.38144647e-3f);
  e = MulAdd(e, r, Set(d, 8.36878062e-3f));
  e = MulAdd(e, r, Set(d, 4.16683943e-2f));
  e = MulAdd(e, r, Set(d, 1.66665201e-1f));
  e = MulAdd(e, r, Set(d, 4.99999934e-1f));
  e = MulAdd(e, r, Set(d, 1.0f));
  e = MulAdd(e, r, Set(d, 1.0f));
  return hn::BitCast(d, Add(hn::BitCast(di, e), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

template <class D, class V>
HWY_INLINE V sigmoid(D d, V x) {
  const V e =
      exponential(d, hn::Min(Set(d, 80.0f), hn::Neg(x)));  // beyond 80 the result is 0 and e would overflow
  return Div(Set(d, 1.0f), Add(Set(d, 1.0f), e));
}

void add(const float* x, float* y, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR { StoreU(Add(LoadU(d, x + i), LoadU(d, y + i)), d, y + i); });
}

void add_scaled(const float* x, float factor, float* y, Size n) {
  each(n, [=](auto d, Size i)
              HWY_ATTR { StoreU(MulAdd(LoadU(d, x + i), Set(d, factor), LoadU(d, y + i)), d, y + i); });
}
void scale(float* x, float factor, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR { StoreU(Mul(LoadU(d, x + i), Set(d, factor)), d, x + i); });
}

double sum_squares(const float* x, Size n) {
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const Size step = lanes(dd);
  auto a = Zero(dd), b = a;
  Size i = 0;
  for (; i + 2 * step <= n; i += 2 * step) {
    const auto u = hn::PromoteTo(dd, LoadU(df, x + i)), v = hn::PromoteTo(dd, LoadU(df, x + i + step));
    a = MulAdd(u, u, a);
    b = MulAdd(v, v, b);
  }
  double rest = 0;
  for (; i < n; ++i) rest += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return hn::GetLane(hn::SumOfLanes(dd, Add(a, b))) + rest;
}

bool all_finite(const float* x, Size n) {
  // 0 * x is 0 for every finite x and NaN for the others, and NaN stays in a sum.
  return sum_of(n, [=](auto d, Size i) HWY_ATTR { return Mul(LoadU(d, x + i), Zero(d)); }) == 0.0f;
}

float dot(const float* x, const float* y, Size n) {
  return sum_of(n, [=](auto d, Size i) HWY_ATTR { return Mul(LoadU(d, x + i), LoadU(d, y + i)); });
}

void residual(const float* x, const float* y, const float* bias, float* out, Size n) {
  if (bias == nullptr) {
    each(n, [=](auto d, Size i) HWY_ATTR { StoreU(Add(LoadU(d, x + i), LoadU(d, y + i)), d, out + i); });
  } else {
    each(n, [=](auto d, Size i) HWY_ATTR {
      StoreU(Add(Add(LoadU(d, x + i), LoadU(d, y + i)), LoadU(d, bias + i)), d, out + i);
    });
  }
}

// LayerNorm and RMSNorm are one computation: the second has mean 0 and no b.
template <bool centered>
HWY_INLINE void normalise(const float* x, const float* w, const float* b, float mean, float rstd, float* y,
                          Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    auto v = LoadU(d, x + i);
    if constexpr (centered) v = Sub(v, Set(d, mean));
    v = Mul(Mul(v, Set(d, rstd)), LoadU(d, w + i));
    if constexpr (centered) v = Add(v, LoadU(d, b + i));
    StoreU(v, d, y + i);
  });
}

template <bool centered>
HWY_INLINE void norm_dx(const float* dy, const float* x, const float* w, float mean, float rstd, float* dx,
                        Size n) {
  // The sums over the row: of dxhat = dy w, and of dxhat xhat with xhat = (x - mean) rstd.
  float level = 0, along = 0;
  const Full d;
  auto levels = Zero(d), alongs = levels, levels2 = levels, alongs2 = levels;
  const auto both = [=](auto tag, Size i, auto& sum, auto& product) HWY_ATTR {
    const auto dxhat = Mul(LoadU(tag, dy + i), LoadU(tag, w + i));
    sum = Add(sum, dxhat);
    product = MulAdd(dxhat, Sub(LoadU(tag, x + i), Set(tag, mean)), product);
  };
  const Size step = lanes(d);
  Size done = 0;
  for (; done + 2 * step <= n; done += 2 * step) {
    both(d, done, levels, alongs);
    both(d, done + step, levels2, alongs2);
  }
  for (; done < n; ++done) {
    const float dxhat = dy[done] * w[done];
    level += dxhat;
    along += dxhat * (x[done] - mean);
  }
  const float count = static_cast<float>(n);
  level = centered ? (level + hn::GetLane(hn::SumOfLanes(d, Add(levels, levels2)))) / count : 0.0f;
  along = (along + hn::GetLane(hn::SumOfLanes(d, Add(alongs, alongs2)))) * rstd / count;
  each(n, [=](auto tag, Size i) HWY_ATTR {
    const auto dxhat = Mul(LoadU(tag, dy + i), LoadU(tag, w + i));
    const auto xhat = Mul(Sub(LoadU(tag, x + i), Set(tag, mean)), Set(tag, rstd));
    auto g = NegMulAdd(xhat, Set(tag, along), dxhat);
    if constexpr (centered) g = Sub(g, Set(tag, level));
    StoreU(MulAdd(g, Set(tag, rstd), LoadU(tag, dx + i)), tag, dx + i);
  });
}

// Rows that a column sum reads at once: memory is read faster in several streams than in one.
constexpr Size streams = 8;

void column_sums(const float* x, Size stride, Size rows, float* sum, Size n) {
  Size r = 0;
  for (; r + streams <= rows; r += streams) {
    const float* first = x + r * stride;
    each(n, [=](auto d, Size i) HWY_ATTR {
      auto total = LoadU(d, sum + i);
      for (Size k = 0; k < streams; ++k) total = Add(total, LoadU(d, first + k * stride + i));
      StoreU(total, d, sum + i);
    });
  }
  for (; r < rows; ++r) add(x + r * stride, sum, n);
}

// count rows at once; centered: stats are (mean, rstd) of each row, otherwise rstd.
template <bool centered, Size count>
HWY_INLINE void norm_dw_rows(const float* dy, Size dy_stride, const float* x, Size x_stride,
                             const float* stats, float* dw, float* db, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    auto weight = LoadU(d, dw + i);
    auto level = Zero(d);
    for (Size r = 0; r < count; ++r) {
      const auto g = LoadU(d, dy + r * dy_stride + i);
      auto xhat = LoadU(d, x + r * x_stride + i);
      if constexpr (centered) {
        xhat = Mul(Sub(xhat, Set(d, stats[2 * r])), Set(d, stats[2 * r + 1]));
        level = Add(level, g);
      } else {
        xhat = Mul(xhat, Set(d, stats[r]));
      }
      weight = MulAdd(g, xhat, weight);
    }
    StoreU(weight, d, dw + i);
    if constexpr (centered) StoreU(Add(level, LoadU(d, db + i)), d, db + i);
  });
}

template <bool centered>
HWY_INLINE void norm_dw(const float* dy, Size dy_stride, const float* x, Size x_stride, const float* stats,
                        Size rows, float* dw, float* db, Size n) {
  constexpr Size each_stats = centered ? 2 : 1;
  Size r = 0;
  for (; r + streams <= rows; r += streams)
    norm_dw_rows<centered, streams>(dy + r * dy_stride, dy_stride, x + r * x_stride, x_stride,
                                    stats + r * each_stats, dw, db, n);
  for (; r < rows; ++r)
    norm_dw_rows<centered, 1>(dy + r * dy_stride, dy_stride, x + r * x_stride, x_stride,
                              stats + r * each_stats, dw, db, n);
}

void layer_norm(const float* x, const float* w, const float* b, float eps, float* y, float* stats, Size n) {
  const float count = static_cast<float>(n);
  const float mean = sum_of(n, [=](auto d, Size i) HWY_ATTR { return LoadU(d, x + i); }) / count;
  const float variance = sum_of(n,
                                [=](auto d, Size i) HWY_ATTR {
                                  const auto v = Sub(LoadU(d, x + i), Set(d, mean));
                                  return Mul(v, v);
                                }) /
                         count;
  stats[0] = mean;
  stats[1] = 1.0f / std::sqrt(variance + eps);
  normalise<true>(x, w, b, mean, stats[1], y, n);
}

void layer_norm_again(const float* x, const float* w, const float* b, const float* stats, float* y, Size n) {
  normalise<true>(x, w, b, stats[0], stats[1], y, n);
}

void layer_norm_dx(const float* dy, const float* x, const float* w, const float* stats, float* dx, Size n) {
  norm_dx<true>(dy, x, w, stats[0], stats[1], dx, n);
}

void layer_norm_dw(const float* dy, Size dy_stride, const float* x, Size x_stride, const float* stats,
                   Size rows, float* dw, float* db, Size n) {
  norm_dw<true>(dy, dy_stride, x, x_stride, stats, rows, dw, db, n);
}

void rms_norm(const float* x, const float* w, float eps, float* y, float* stats, Size n) {
  stats[0] = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
  normalise<false>(x, w, nullptr, 0.0f, stats[0], y, n);
}

void rms_norm_again(const float* x, const float* w, const float* stats, float* y, Size n) {
  normalise<false>(x, w, nullptr, 0.0f, stats[0], y, n);
}

void rms_norm_dx(const float* dy, const float* x, const float* w, const float* stats, float* dx, Size n) {
  norm_dx<false>(dy, x, w, 0.0f, stats[0], dx, n);
}

void rms_norm_dw(const float* dy, Size dy_stride, const float* x, Size x_stride, const float* stats,
                 Size rows, float* dw, Size n) {
  norm_dw<false>(dy, dy_stride, x, x_stride, stats, rows, dw, nullptr, n);
}

// gelu(h) = h (1 + tanh u) / 2 = h sigmoid(2u), 2u = h (k0 + k1 h^2).
constexpr float k0 = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float k1 = 1.5957691216057308f * 0.044715f;

// h + bias (where there is one), which h becomes.
template <class D>
HWY_INLINE hn::Vec<D> biased(D d, float* h, const float* bias, Size i) {
  auto v = LoadU(d, h + i);
  if (bias != nullptr) {
    v = Add(v, LoadU(d, bias + i));
    StoreU(v, d, h + i);
  }
  return v;
}

void gelu(float* h, const float* bias, float* y, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto v = biased(d, h, bias, i);
    const auto u2 = Mul(v, MulAdd(Set(d, k1), Mul(v, v), Set(d, k0)));
    StoreU(Mul(v, sigmoid(d, u2)), d, y + i);
  });
}

void gelu_backward(float* h, float* dy, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto v = LoadU(d, h + i), square = Mul(v, v);
    const auto s = sigmoid(d, Mul(v, MulAdd(Set(d, k1), square, Set(d, k0))));
    const auto y = Mul(v, s);
    const auto slope = MulAdd(Set(d, 3 * k1), square, Set(d, k0));  // of 2u
    const auto derivative = MulAdd(Mul(y, Sub(Set(d, 1.0f), s)), slope, s);
    StoreU(y, d, h + i);
    StoreU(Mul(LoadU(d, dy + i), derivative), d, dy + i);
  });
}

void relu2(float* h, const float* bias, float* y, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto positive = Max(biased(d, h, bias, i), Zero(d));
    StoreU(Mul(positive, positive), d, y + i);
  });
}

void relu2_backward(float* h, float* dy, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto positive = Max(LoadU(d, h + i), Zero(d));
    StoreU(Mul(positive, positive), d, h + i);
    StoreU(Mul(LoadU(d, dy + i), Add(positive, positive)), d, dy + i);
  });
}

Simd::ActivationPasses activation(Activation a) {
  check(!is_gated(a), "an activation without a gate");
  if (a == Activation::relu2) return {relu2, relu2_backward};
  return {gelu, gelu_backward};
}

void swiglu(const float* gate, const float* up, float* y, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto g = LoadU(d, gate + i);
    StoreU(Mul(Mul(g, sigmoid(d, g)), LoadU(d, up + i)), d, y + i);
  });
}

void swiglu_backward(float* gate, float* up, float* dy, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto g = LoadU(d, gate + i), u = LoadU(d, up + i), grad = LoadU(d, dy + i);
    const auto s = sigmoid(d, g), silu = Mul(g, s);
    const auto slope = MulAdd(silu, Sub(Set(d, 1.0f), s), s);
    StoreU(Mul(Mul(grad, u), slope), d, gate + i);
    StoreU(Mul(grad, silu), d, up + i);
    StoreU(Mul(silu, u), d, dy + i);
  });
}

void rotate(float* low, float* high, const float* cosine, const float* sine, float sign, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto a = LoadU(d, low + i), b = LoadU(d, high + i);
    const auto c = LoadU(d, cosine + i), s = Mul(LoadU(d, sine + i), Set(d, sign));
    StoreU(NegMulAdd(b, s, Mul(a, c)), d, low + i);
    StoreU(MulAdd(a, s, Mul(b, c)), d, high + i);
  });
}

float max(const float* x, Size n) {
  const Full d;
  auto a = Set(d, -std::numeric_limits<float>::infinity()), b = a;
  const Size step = lanes(d);
  Size i = 0;
  for (; i + 2 * step <= n; i += 2 * step) {
    a = hn::Max(a, LoadU(d, x + i));
    b = hn::Max(b, LoadU(d, x + i + step));
  }
  float result = hn::GetLane(hn::MaxOfLanes(d, hn::Max(a, b)));
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

float exp_sum(float* x, float max, Size n) {
  return sum_of(n, [=](auto d, Size i) HWY_ATTR {
    const auto e = exponential(d, Sub(LoadU(d, x + i), Set(d, max)));
    StoreU(e, d, x + i);
    return e;
  });
}

void adamw(float* p, const float* g, float* m, float* v, const AdamWFactors& f, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto gradient = Mul(LoadU(d, g + i), Set(d, f.gradient_scale));
    const auto mean = MulAdd(LoadU(d, m + i), Set(d, f.beta1), Mul(gradient, Set(d, f.one_minus_beta1)));
    const auto square =
        MulAdd(LoadU(d, v + i), Set(d, f.beta2), Mul(Mul(gradient, gradient), Set(d, f.one_minus_beta2)));
    const auto root = MulAdd(hn::Sqrt(square), Set(d, f.root_scale), Set(d, f.eps));
    const auto step = Div(Mul(mean, Set(d, f.rate)), root);
    StoreU(mean, d, m + i);
    StoreU(square, d, v + i);
    StoreU(Sub(Mul(LoadU(d, p + i), Set(d, f.decay)), step), d, p + i);
  });
}

float softmax_row(float* s, Size visible, Size n, float* max, float* sum) {
  const Full d;
  const Size step = lanes(d);
  if (visible <= 0) {
    for (Size i = 0; i < n; i += step) StoreU(Zero(d), d, s + i);
    return 1.0f;
  }
  // The last vector is cut by a mask; the row has room for the whole of it.
  const Size whole = visible / step * step;
  const auto seen = hn::FirstN(d, static_cast<std::size_t>(visible - whole));
  auto top = Set(d, *max), top2 = top;
  Size i = 0;
  for (; i + 2 * step <= whole; i += 2 * step) {
    top = hn::Max(top, LoadU(d, s + i));
    top2 = hn::Max(top2, LoadU(d, s + i + step));
  }
  if (i < whole) top = hn::Max(top, LoadU(d, s + i));
  if (whole < visible) top2 = hn::Max(top2, hn::IfThenElse(seen, LoadU(d, s + whole), Set(d, kLowest)));
  const float new_max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(top, top2)));
  auto total = Zero(d);
  for (i = 0; i < whole; i += step) {
    const auto p = exponential(d, Sub(LoadU(d, s + i), Set(d, new_max)));
    StoreU(p, d, s + i);
    total = Add(total, p);
  }
  if (whole < visible) {
    const auto p = hn::IfThenElseZero(seen, exponential(d, Sub(LoadU(d, s + whole), Set(d, new_max))));
    StoreU(p, d, s + whole);
    total = Add(total, p);
    i += step;
  }
  for (; i < n; i += step) StoreU(Zero(d), d, s + i);
  const float correction = std::exp(*max - new_max);
  *max = new_max;
  *sum = *sum * correction + hn::GetLane(hn::SumOfLanes(d, total));
  return correction;
}

void softmax_gradient_row(float* s, float* dp, Size visible, Size n, float lse, float delta) {
  const Full d;
  const Size step = lanes(d);
  const Size shown = visible > 0 ? visible : 0;
  const auto gradient = [=](Size i) HWY_ATTR {
    const auto p = exponential(d, Sub(LoadU(d, s + i), Set(d, lse)));
    StoreU(p, d, s + i);
    StoreU(Mul(p, Sub(LoadU(d, dp + i), Set(d, delta))), d, dp + i);
  };
  Size i = 0;
  for (; i < shown; i += step) gradient(i);
  // The last vector may reach beyond what is visible.
  if (i > shown) {
    const auto seen = hn::FirstN(d, static_cast<std::size_t>(shown - (i - step)));
    StoreU(hn::IfThenElseZero(seen, LoadU(d, s + i - step)), d, s + i - step);
    StoreU(hn::IfThenElseZero(seen, LoadU(d, dp + i - step)), d, dp + i - step);
  }
  for (; i < n; i += step) {
    StoreU(Zero(d), d, s + i);
    StoreU(Zero(d), d, dp + i);
  }
}

}  // namespace

const Simd* passes() {
  static constexpr Simd table{
      add,           add_scaled,    scale,       sum_squares,     all_finite,
      dot,           residual,      column_sums, layer_norm,      layer_norm_again,
      layer_norm_dx, layer_norm_dw, rms_norm,    rms_norm_again,  rms_norm_dx,
      rms_norm_dw,   activation,    swiglu,      swiglu_backward, rotate,
      max,           exp_sum,       adamw,       softmax_row,     softmax_gradient_row};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace echelon {

HWY_EXPORT(passes);

const Simd& simd() { return *HWY_DYNAMIC_DISPATCH(passes)(); }

}  // namespace echelon
#endif
