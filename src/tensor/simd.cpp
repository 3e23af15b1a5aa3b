#include "tensor/simd.h"

#include "base/error.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include "tensor/simd_bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Size = std::int64_t;
using Full = hn::ScalableTag<float>;
using One = hn::CappedTag<float, 1>;  // the rest of a row goes through the same code one element at a time
using hn::Add, hn::Div, hn::Mul, hn::MulAdd, hn::NegMulAdd, hn::Set, hn::Sub, hn::Zero;

constexpr float kUnseen = -std::numeric_limits<float>::infinity();  // as a score

template <class D>
Size lanes(D d) {
  return static_cast<Size>(hn::Lanes(d));
}

// Calls f(d, i) for each vector of the row.
template <class F>
HWY_INLINE void each(Size n, F f) {
  const Full d;
  Size i = 0;
  for (; i + lanes(d) <= n; i += lanes(d)) f(d, i);
  for (; i < n; ++i) f(One(), i);
}

// Operands to prefetch, since the processor follows the several streams of a pass over large operands too
// late.
template <class... T>
HWY_INLINE std::tuple<const T*...> fetching(const T*... from) {
  return {from...};
}
// How far ahead, in bytes. Rows mostly lie one behind the other: behind the end of a row the next one begins.
constexpr Size ahead = 2048;

// Prefetches are written where the loop is: GCC takes a function that only prefetches for one without effect.
template <class... T, std::size_t... k, class F>
HWY_INLINE void each(Size n, const std::tuple<const T*...>& fetched, std::index_sequence<k...>, F f) {
  const Full d;
  Size i = 0;
  for (; i + lanes(d) <= n; i += lanes(d)) {
    (__builtin_prefetch(reinterpret_cast<const char*>(std::get<k>(fetched) + i) + ahead), ...);
    f(d, i);
  }
  for (; i < n; ++i) f(One(), i);
}
template <class... T, class F>
HWY_INLINE void each(Size n, const std::tuple<const T*...>& fetched, F f) {
  each(n, fetched, std::index_sequence_for<T...>(), f);
}

// The sum of the vectors f(d, i): four running sums, so that additions need not wait for each other.
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

// Keeps NaN: the result of Max() and Min() for it differs between instruction sets, but every comparison with
// it is false.
template <class V>
HWY_INLINE V at_most(V v, V most) {
  return hn::IfThenElse(hn::Lt(most, v), most, v);
}
template <class V>
HWY_INLINE V at_least(V v, V least) {
  return hn::IfThenElse(hn::Lt(v, least), least, v);
}

// e^x within 2 ulp for x in [-87, 88], 0 at -88 and infinity at 89; larger |x| are not allowed; keeps NaN.
// Half the instructions of hn::Exp, which would take a third of the time of attention's matrix products. x =
// n ln2 + r with |r| <= ln2 / 2, and e^x = 2^n e^r; the polynomial is the minimax one (3e-9) for e^r.
template <class D, class V>
HWY_INLINE V exponential_within(D d, V x) {
  const hn::RebindToSigned<D> di;
  // 1.5 * 2^23 + 127: after adding it, the low bits of the float are the integer n plus the exponent bias.
  const V rounder = Set(d, 12583039.0f);
  const V shifted = MulAdd(x, Set(d, 1.44269504f), rounder);
  const V n = Sub(shifted, rounder);
  const V r = NegMulAdd(n, Set(d, -2.12194440e-4f), NegMulAdd(n, Set(d, 0.693359375f), x));
  V e = Set(d, 1.38144647e-3f);
  e = MulAdd(e, r, Set(d, 8.36878062e-3f));
  e = MulAdd(e, r, Set(d, 4.16683943e-2f));
  e = MulAdd(e, r, Set(d, 1.66665201e-1f));
  e = MulAdd(e, r, Set(d, 4.99999934e-1f));
  e = MulAdd(e, r, Set(d, 1.0f));
  e = MulAdd(e, r, Set(d, 1.0f));
  return Mul(e, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

// e^x for x up to 88, and e^-87 = 1.6e-38 below -87; keeps NaN.
template <class D, class V>
HWY_INLINE V exponential(D d, V x) {
  return exponential_within(d, at_least(x, Set(d, -87.0f)));
}

// 0 for x so low that the result would be subnormal, which is negligible next to any x. For NaN the result
// may or may not be NaN, as with Max() and Min(); callers that multiply it by x keep NaN.
template <class D, class V>
HWY_INLINE V sigmoid(D d, V x) {
  const V bounded = hn::Min(Set(d, 89.0f), hn::Max(Set(d, -87.0f), hn::Neg(x)));
  return Div(Set(d, 1.0f), Add(Set(d, 1.0f), exponential_within(d, bounded)));
}

template <class X, class Y>
void add(const X* x, Y* y, Size n) {
  each(n, fetching(x, y),
       [=](auto d, Size i) HWY_ATTR { store(Add(load(d, x + i), load(d, y + i)), d, y + i); });
}

template <class T>
void add_scaled(const T* x, float factor, float* y, Size n) {
  each(n, [=](auto d, Size i)
              HWY_ATTR { store(MulAdd(load(d, x + i), Set(d, factor), load(d, y + i)), d, y + i); });
}
template <class X, class Y>
void scaled(const X* x, float factor, Y* y, Size n) {
  each(n, fetching(x, y),
       [=](auto d, Size i) HWY_ATTR { store(Mul(load(d, x + i), Set(d, factor)), d, y + i); });
}
template <class X, class Y>
void copy(const X* x, Y* y, Size n) {
  each(n, fetching(x), [=](auto d, Size i) HWY_ATTR { store(load(d, x + i), d, y + i); });
}

template <class T>
double sum_squares(const T* x, Size n) {
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const Size step = lanes(dd);
  auto a = Zero(dd), b = a;
  Size i = 0;
  for (; i + 2 * step <= n; i += 2 * step) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + ahead);
    const auto u = hn::PromoteTo(dd, load(df, x + i)), v = hn::PromoteTo(dd, load(df, x + i + step));
    a = MulAdd(u, u, a);
    b = MulAdd(v, v, b);
  }
  double rest = 0;
  for (; i < n; ++i) rest += double{x[i]} * double{x[i]};
  return hn::GetLane(hn::SumOfLanes(dd, Add(a, b))) + rest;
}

template <class T>
void sum_squares_exactly(const T* x, double scale, Size n, double* high, double* low) {
  constexpr double unit = 4294967296.0;  // 2^32
  const hn::ScalableTag<double> dd;
  const hn::CappedTag<double, 1> last;
  const auto add_digits = [=](auto d, Size i, auto& highs, auto& lows) HWY_ATTR {
    const auto v = hn::PromoteTo(d, load(hn::Rebind<float, decltype(d)>(), x + i));
    const auto square = Mul(Mul(v, v), Set(d, scale * unit)), whole = hn::Trunc(square);
    highs = Add(highs, whole);
    lows = Add(lows, hn::Trunc(Mul(Sub(square, whole), Set(d, unit))));
  };
  auto highs = Zero(dd), lows = highs;
  auto last_high = Zero(last), last_low = last_high;
  Size i = 0;
  for (; i + lanes(dd) <= n; i += lanes(dd)) add_digits(dd, i, highs, lows);
  for (; i < n; ++i) add_digits(last, i, last_high, last_low);
  *high = hn::GetLane(hn::SumOfLanes(dd, highs)) + hn::GetLane(last_high);
  *low = hn::GetLane(hn::SumOfLanes(dd, lows)) + hn::GetLane(last_low);
}

template <class T>
bool all_finite(const T* x, Size n) {
  // 0 * x is 0 for every finite x and NaN for others, and NaN stays in a sum.
  return sum_of(n, [=](auto d, Size i) HWY_ATTR { return Mul(load(d, x + i), Zero(d)); }) == 0.0f;
}

template <class T>
float largest(const T* x, Size n) {
  // As integers, NaN is above infinity, and infinity above all numbers.
  const auto bits = [=](auto d, Size i) HWY_ATTR {
    return hn::BitCast(hn::RebindToSigned<decltype(d)>(), hn::Abs(load(d, x + i)));
  };
  const Full d;
  const hn::RebindToSigned<Full> words;
  auto most = Zero(words);
  Size i = 0;
  for (; i + lanes(d) <= n; i += lanes(d)) most = hn::Max(most, bits(d, i));
  std::int32_t all = hn::GetLane(hn::MaxOfLanes(words, most));
  for (; i < n; ++i) all = std::max(all, hn::GetLane(bits(One(), i)));
  return std::bit_cast<float>(all);
}

// As rounded_to_fp8(), which explains it.
template <Fp8 format, class T>
void round_to(const T* x, float scale, T* y, Size n) {
  constexpr Fp8Shape shape = shape_of(format);
  constexpr int cut = 23 - shape.fraction_bits;
  const float least_normal = power_of_two(1 - shape.bias),
              apart = power_of_two(1 - shape.bias - shape.fraction_bits + 23), back = 1 / scale;
  each(n, [=](auto d, Size i) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(d)> words;
    const auto v = Mul(load(d, x + i), Set(d, scale));
    const auto size = hn::Abs(v);
    const auto bits = hn::BitCast(words, size);
    const auto odd = hn::And(hn::ShiftRight<cut>(bits), Set(words, 1u));
    const auto sum = Add(bits, Add(Set(words, (1u << (cut - 1)) - 1), odd));
    const auto normal = hn::BitCast(d, hn::And(sum, Set(words, ~((1u << cut) - 1))));
    const auto small = Sub(Add(size, Set(d, apart)), Set(d, apart));
    const auto rounded =
        hn::Min(hn::IfThenElse(hn::Lt(size, Set(d, least_normal)), small, normal), Set(d, shape.largest));
    const auto signed_one = hn::CopySignToAbs(rounded, v);
    store(Mul(hn::IfThenElse(hn::IsNaN(v), v, signed_one), Set(d, back)), d, y + i);
  });
}
template <class T>
void round_to_fp8(const T* x, float scale, Fp8 format, T* y, Size n) {
  if (format == Fp8::e4m3) return round_to<Fp8::e4m3>(x, scale, y, n);
  round_to<Fp8::e5m2>(x, scale, y, n);
}

template <class T>
float dot(const T* x, const T* y, Size n) {
  return sum_of(n, [=](auto d, Size i) HWY_ATTR { return Mul(load(d, x + i), load(d, y + i)); });
}

template <class T>
void residual(const T* x, const T* y, const T* bias, T* out, Size n) {
  if (bias == nullptr) {
    each(n, fetching(x, y),
         [=](auto d, Size i) HWY_ATTR { store(Add(load(d, x + i), load(d, y + i)), d, out + i); });
  } else {
    each(n, fetching(x, y), [=](auto d, Size i) HWY_ATTR {
      store(Add(Add(load(d, x + i), load(d, y + i)), load(d, bias + i)), d, out + i);
    });
  }
}

template <class T, class D>
HWY_INLINE auto gated_channel(D d, const ConvolvedRow<T>& r, Size before, Size i) {
  const T* const b = r.given - before * r.stride + i;
  return Mul(load(d, b), load(d, b + 2 * r.width));
}
template <class T, class D>
HWY_INLINE auto convolved_channel(D d, const ConvolvedRow<T>& r, Size i) {
  auto sum = Zero(d);
  for (Size k = 0; k < r.before; ++k)
    sum = MulAdd(load(d, r.taps + k * r.width + i), gated_channel(d, r, k, i), sum);
  return sum;
}

template <class T>
void short_convolution(const ConvolvedRow<T>& r, T* y) {
  each(r.width, [&r, y](auto d, Size i) HWY_ATTR {
    store(Mul(load(d, r.given + r.width + i), convolved_channel(d, r, i)), d, y + i);
  });
}

template <class T>
void short_convolution_backward(const ConvolvedRow<T>& r, const T* dy, Size dy_stride, Size seen_by,
                                T* d_given, T* y) {
  each(r.width, [=, &r](auto d, Size i) HWY_ATTR {
    auto sum = Zero(d);
    for (Size k = 0; k < seen_by; ++k)
      sum = MulAdd(load(d, r.taps + k * r.width + i),
                   Mul(load(d, dy + k * dy_stride + i), load(d, r.given + k * r.stride + r.width + i)), sum);
    const auto gate = load(d, r.given + r.width + i), convolved = convolved_channel(d, r, i);
    store(Mul(sum, load(d, r.given + 2 * r.width + i)), d, d_given + i);
    store(Mul(load(d, dy + i), convolved), d, d_given + r.width + i);
    store(Mul(sum, load(d, r.given + i)), d, d_given + 2 * r.width + i);
    store(Mul(gate, convolved), d, y + i);
  });
}

template <class T>
void short_convolution_taps(const ConvolvedRow<T>& r, const T* dy, float* sums, Size n) {
  each(n, [=, &r](auto d, Size i) HWY_ATTR {
    const auto du = Mul(load(d, dy + i), load(d, r.given + r.width + i));
    for (Size k = 0; k < r.before; ++k)
      store(MulAdd(du, gated_channel(d, r, k, i), load(d, sums + k * n + i)), d, sums + k * n + i);
  });
}

// LayerNorm and RMSNorm share this code: RMSNorm has mean 0 and no b.
template <bool centered, bool weighted, bool biased, class T>
HWY_INLINE void normalise(const T* x, const T* w, const T* b, float mean, float rstd, T* y, Size n) {
  each(n, fetching(x), [=](auto d, Size i) HWY_ATTR {
    auto v = load(d, x + i);
    if constexpr (centered) v = Sub(v, Set(d, mean));
    v = Mul(v, Set(d, rstd));
    if constexpr (weighted) v = Mul(v, load(d, w + i));
    if constexpr (biased) v = Add(v, load(d, b + i));
    store(v, d, y + i);
  });
}

// dx += rstd (dxhat - level - xhat along), xhat = (x - mean) rstd, dxhat = dy w.
template <bool centered, bool weighted, class T>
HWY_INLINE void add_norm_dx(const T* dy, const T* x, const T* w, float mean, float rstd, float level,
                            float along, T* dx, Size n) {
  each(n, [=](auto tag, Size i) HWY_ATTR {
    auto dxhat = load(tag, dy + i);
    if constexpr (weighted) dxhat = Mul(dxhat, load(tag, w + i));
    const auto xhat = Mul(Sub(load(tag, x + i), Set(tag, mean)), Set(tag, rstd));
    auto g = NegMulAdd(xhat, Set(tag, along), dxhat);
    if constexpr (centered) g = Sub(g, Set(tag, level));
    store(MulAdd(g, Set(tag, rstd), load(tag, dx + i)), tag, dx + i);
  });
}

template <bool centered, bool weighted, class T>
HWY_INLINE void norm_dx(const T* dy, const T* x, const T* w, float mean, float rstd, T* dx, Size n) {
  // Sums over the row: of dxhat = dy w, and of dxhat xhat with xhat = (x - mean) rstd.
  float level = 0, along = 0;
  const Full d;
  auto levels = Zero(d), alongs = levels, levels2 = levels, alongs2 = levels;
  const auto both = [=](auto tag, Size i, auto& sum, auto& product) HWY_ATTR {
    auto dxhat = load(tag, dy + i);
    if constexpr (weighted) dxhat = Mul(dxhat, load(tag, w + i));
    sum = Add(sum, dxhat);
    product = MulAdd(dxhat, Sub(load(tag, x + i), Set(tag, mean)), product);
  };
  const Size step = lanes(d);
  Size done = 0;
  for (; done + 2 * step <= n; done += 2 * step) {
    for (const T* const from : {dy, x, static_cast<const T*>(dx)})
      __builtin_prefetch(reinterpret_cast<const char*>(from + done) + ahead);
    both(d, done, levels, alongs);
    both(d, done + step, levels2, alongs2);
  }
  for (; done < n; ++done) {
    float dxhat = float{dy[done]};
    if constexpr (weighted) dxhat *= float{w[done]};
    level += dxhat;
    along += dxhat * (x[done] - mean);
  }
  const float count = static_cast<float>(n);
  level = centered ? (level + hn::GetLane(hn::SumOfLanes(d, Add(levels, levels2)))) / count : 0.0f;
  along = (along + hn::GetLane(hn::SumOfLanes(d, Add(alongs, alongs2)))) * rstd / count;
  add_norm_dx<centered, weighted>(dy, x, w, mean, rstd, level, along, dx, n);
}

// How many rows a column sum reads at once: several streams read memory faster than one.
constexpr Size streams = 8;

template <class T>
void column_sums(const T* x, Size stride, Size rows, float* sum, Size n) {
  Size r = 0;
  for (; r + streams <= rows; r += streams) {
    const T* first = x + r * stride;
    each(n, [=](auto d, Size i) HWY_ATTR {
      auto total = load(d, sum + i);
      for (Size k = 0; k < streams; ++k) {
        __builtin_prefetch(first + (streams + k) * stride + i);
        total = Add(total, load(d, first + k * stride + i));
      }
      store(total, d, sum + i);
    });
  }
  for (; r < rows; ++r) add(x + r * stride, sum, n);
}

// count rows at once; if centered, stats are (mean, rstd) of each row, otherwise rstd.
template <bool centered, Size count, class T>
HWY_INLINE void norm_dw_rows(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats,
                             float* dw, float* db, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    auto weight = load(d, dw + i);
    auto level = Zero(d);
    for (Size r = 0; r < count; ++r) {
      if constexpr (count > 1) {  // the next rows'
        __builtin_prefetch(dy + (count + r) * dy_stride + i);
        __builtin_prefetch(x + (count + r) * x_stride + i);
      }
      const auto g = load(d, dy + r * dy_stride + i);
      auto xhat = load(d, x + r * x_stride + i);
      if constexpr (centered) {
        xhat = Mul(Sub(xhat, Set(d, stats[2 * r])), Set(d, stats[2 * r + 1]));
        level = Add(level, g);
      } else {
        xhat = Mul(xhat, Set(d, stats[r]));
      }
      weight = MulAdd(g, xhat, weight);
    }
    store(weight, d, dw + i);
    if constexpr (centered) store(Add(level, load(d, db + i)), d, db + i);
  });
}

template <bool centered, class T>
HWY_INLINE void norm_dw(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                        float* dw, float* db, Size n) {
  constexpr Size each_stats = centered ? 2 : 1;
  Size r = 0;
  for (; r + streams <= rows; r += streams)
    norm_dw_rows<centered, streams>(dy + r * dy_stride, dy_stride, x + r * x_stride, x_stride,
                                    stats + r * each_stats, dw, db, n);
  for (; r < rows; ++r)
    norm_dw_rows<centered, 1>(dy + r * dy_stride, dy_stride, x + r * x_stride, x_stride,
                              stats + r * each_stats, dw, db, n);
}

template <class T>
HWY_INLINE void normalise_centered(const T* x, const T* w, const T* b, const float* stats, T* y, Size n) {
  if (b != nullptr)
    normalise<true, true, true>(x, w, b, stats[0], stats[1], y, n);
  else if (w != nullptr)
    normalise<true, true, false>(x, w, b, stats[0], stats[1], y, n);
  else
    normalise<true, false, false>(x, w, b, stats[0], stats[1], y, n);
}

template <class T>
void layer_norm(const T* x, const T* w, const T* b, float eps, T* y, float* stats, Size n) {
  const float count = static_cast<float>(n);
  const float mean = sum_of(n, [=](auto d, Size i) HWY_ATTR { return load(d, x + i); }) / count;
  const float variance = sum_of(n,
                                [=](auto d, Size i) HWY_ATTR {
                                  const auto v = Sub(load(d, x + i), Set(d, mean));
                                  return Mul(v, v);
                                }) /
                         count;
  stats[0] = mean;
  stats[1] = 1.0f / std::sqrt(variance + eps);
  normalise_centered(x, w, b, stats, y, n);
}

template <class T>
void layer_norm_again(const T* x, const T* w, const T* b, const float* stats, T* y, Size n) {
  normalise_centered(x, w, b, stats, y, n);
}

template <class T>
void layer_norm_dx(const T* dy, const T* x, const T* w, const float* stats, T* dx, Size n) {
  if (w != nullptr)
    norm_dx<true, true>(dy, x, w, stats[0], stats[1], dx, n);
  else
    norm_dx<true, false>(dy, x, w, stats[0], stats[1], dx, n);
}

template <class T>
void layer_norm_dw(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                   float* dw, float* db, Size n) {
  norm_dw<true>(dy, dy_stride, x, x_stride, stats, rows, dw, db, n);
}

template <class T>
void rms_norm_again(const T* x, const T* w, const float* stats, T* y, Size n) {
  if (w != nullptr)
    normalise<false, true, false, T>(x, w, nullptr, 0.0f, stats[0], y, n);
  else
    normalise<false, false, false, T>(x, w, nullptr, 0.0f, stats[0], y, n);
}

template <class T>
void rms_norm(const T* x, const T* w, float eps, T* y, float* stats, Size n) {
  stats[0] = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
  rms_norm_again(x, w, stats, y, n);
}

template <class T>
void rms_norm_dx(const T* dy, const T* x, const T* w, const float* stats, T* dx, Size n) {
  if (w != nullptr)
    norm_dx<false, true>(dy, x, w, 0.0f, stats[0], dx, n);
  else
    norm_dx<false, false>(dy, x, w, 0.0f, stats[0], dx, n);
}

template <class T>
float rms_norm_dx_sum(const T* dy, const T* x, const T* w, float rstd, Size n) {
  return rstd * sum_of(n, [=](auto d, Size i)
                              HWY_ATTR { return Mul(Mul(load(d, dy + i), load(d, w + i)), load(d, x + i)); });
}

template <class T>
void rms_norm_dx_of(const T* dy, const T* x, const T* w, float rstd, float mean, T* dx, Size n) {
  add_norm_dx<false, true>(dy, x, w, 0.0f, rstd, 0.0f, mean, dx, n);
}

template <class T>
void rms_norm_dw(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                 float* dw, Size n) {
  norm_dw<false>(dy, dy_stride, x, x_stride, stats, rows, dw, nullptr, n);
}

// gelu(h) = h (1 + tanh u) / 2 = h sigmoid(2u), 2u = h (k0 + k1 h^2).
constexpr float k0 = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float k1 = 1.5957691216057308f * 0.044715f;

// For the slope of gelu: beyond this h^2 the sigmoid is 0 or 1 anyway; the limit avoids a NaN from infinity
// times 0.
template <class D, class V>
HWY_INLINE V bounded_square(D d, V h) {
  return hn::Min(Mul(h, h), Set(d, 1e4f));
}

// h + bias (if any), which is stored in h.
template <class D, class T>
HWY_INLINE hn::Vec<D> biased(D d, T* h, const T* bias, Size i) {
  auto v = load(d, h + i);
  if (bias != nullptr) {
    v = Add(v, load(d, bias + i));
    store(v, d, h + i);
  }
  return v;
}

template <class T>
void gelu(T* h, const T* bias, T* y, Size n) {
  each(n, fetching(h), [=](auto d, Size i) HWY_ATTR {
    const auto v = biased(d, h, bias, i);
    const auto u2 = Mul(v, MulAdd(Set(d, k1), Mul(v, v), Set(d, k0)));
    store(Mul(v, sigmoid(d, u2)), d, y + i);
  });
}

template <class T>
void gelu_backward(T* h, T* dy, Size n) {
  each(n, fetching(h, dy), [=](auto d, Size i) HWY_ATTR {
    const auto v = load(d, h + i), square = bounded_square(d, v);
    const auto s = sigmoid(d, Mul(v, MulAdd(Set(d, k1), square, Set(d, k0))));
    const auto y = Mul(v, s);
    const auto slope = MulAdd(Set(d, 3 * k1), square, Set(d, k0));  // of 2u
    const auto derivative = MulAdd(Mul(y, Sub(Set(d, 1.0f), s)), slope, s);
    store(y, d, h + i);
    store(Mul(load(d, dy + i), derivative), d, dy + i);
  });
}

// erf, by a rational minimax approximation that is 1 in float beyond 4 (Eigen, Mozilla Public License 2.0:
// generic_fast_erf_float).
template <class D, class V>
HWY_INLINE V error_function(D d, V v) {
  const V x = hn::Clamp(v, Set(d, -4.0f), Set(d, 4.0f)), square = Mul(x, x);
  V p = Set(d, -2.72614225801306e-10f);
  for (const float a : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f,
                        -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f})
    p = MulAdd(p, square, Set(d, a));
  V q = Set(d, -1.45660718464996e-05f);
  for (const float b :
       {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f})
    q = MulAdd(q, square, Set(d, b));
  return Div(Mul(x, p), q);
}

template <class D, class V>
HWY_INLINE V normal_distribution(D d, V x) {
  const V half = Set(d, 0.5f);
  return MulAdd(half, error_function(d, Mul(x, Set(d, 0.70710678f))), half);
}

template <class T>
void gelu_erf(T* h, const T* bias, T* y, Size n) {
  each(n, fetching(h), [=](auto d, Size i) HWY_ATTR {
    const auto v = biased(d, h, bias, i);
    store(Mul(v, normal_distribution(d, v)), d, y + i);
  });
}

template <class T>
void gelu_erf_backward(T* h, T* dy, Size n) {
  each(n, fetching(h, dy), [=](auto d, Size i) HWY_ATTR {
    const auto v = load(d, h + i), below = normal_distribution(d, v), power = Mul(Set(d, -0.5f), Mul(v, v));
    const auto density = Mul(Set(d, 0.39894228f), exponential_within(d, hn::Max(Set(d, -88.0f), power)));
    store(Mul(v, below), d, h + i);
    store(Mul(load(d, dy + i), MulAdd(v, density, below)), d, dy + i);
  });
}

// Keeps NaN: the result of Max() and Min() for it differs between instruction sets, but every comparison with
// it is false.
template <class D, class V>
HWY_INLINE V positive_part(D d, V v) {
  return hn::IfThenZeroElse(hn::Lt(v, Zero(d)), v);
}
template <class T>
void relu(T* h, const T* bias, T* y, Size n) {
  each(n, fetching(h),
       [=](auto d, Size i) HWY_ATTR { store(positive_part(d, biased(d, h, bias, i)), d, y + i); });
}

template <class T>
void relu_backward(T* h, T* dy, Size n) {
  each(n, fetching(h, dy), [=](auto d, Size i) HWY_ATTR {
    const auto v = load(d, h + i);
    store(positive_part(d, v), d, h + i);
    const auto slope = hn::IfThenElseZero(hn::Gt(v, Zero(d)), Set(d, 1.0f));
    store(Mul(load(d, dy + i), slope), d, dy + i);  // NaN gradients are kept too
  });
}

template <class T>
void relu2(T* h, const T* bias, T* y, Size n) {
  each(n, fetching(h), [=](auto d, Size i) HWY_ATTR {
    const auto positive = positive_part(d, biased(d, h, bias, i));
    store(Mul(positive, positive), d, y + i);
  });
}

template <class T>
void relu2_backward(T* h, T* dy, Size n) {
  each(n, fetching(h, dy), [=](auto d, Size i) HWY_ATTR {
    const auto positive = positive_part(d, load(d, h + i));
    store(Mul(positive, positive), d, h + i);
    store(Mul(load(d, dy + i), Add(positive, positive)), d, dy + i);
  });
}

template <class T>
ActivationPasses<T> activation(Activation a) {
  check(!is_gated(a), "an activation without a gate");
  if (a == Activation::relu) return {relu<T>, relu_backward<T>};
  if (a == Activation::relu2) return {relu2<T>, relu2_backward<T>};
  if (a == Activation::gelu_erf) return {gelu_erf<T>, gelu_erf_backward<T>};
  return {gelu<T>, gelu_backward<T>};
}

template <class T>
void swiglu(const T* gate, const T* up, T* y, Size n, float, float) {
  each(n, fetching(gate, up), [=](auto d, Size i) HWY_ATTR {
    const auto g = load(d, gate + i);
    store(Mul(Mul(g, sigmoid(d, g)), load(d, up + i)), d, y + i);
  });
}

template <class T, class Y>
void swiglu_backward(T* gate, T* up, Y* dy, Size n, float, float) {
  each(n, fetching(gate, up, dy), [=](auto d, Size i) HWY_ATTR {
    const auto g = load(d, gate + i), u = load(d, up + i), grad = load(d, dy + i);
    const auto s = sigmoid(d, g), silu = Mul(g, s);
    const auto slope = MulAdd(silu, Sub(Set(d, 1.0f), s), s);
    store(Mul(Mul(grad, u), slope), d, gate + i);
    store(Mul(grad, silu), d, up + i);
    store(Mul(silu, u), d, dy + i);
  });
}

template <class T>
void geglu(const T* gate, const T* up, T* y, Size n, float, float) {
  each(n, fetching(gate, up), [=](auto d, Size i) HWY_ATTR {
    const auto g = load(d, gate + i);
    const auto u2 = Mul(g, MulAdd(Set(d, k1), Mul(g, g), Set(d, k0)));
    store(Mul(Mul(g, sigmoid(d, u2)), load(d, up + i)), d, y + i);
  });
}

template <class T>
void geglu_backward(T* gate, T* up, T* dy, Size n, float, float) {
  each(n, fetching(gate, up, dy), [=](auto d, Size i) HWY_ATTR {
    const auto g = load(d, gate + i), u = load(d, up + i), grad = load(d, dy + i),
               square = bounded_square(d, g);
    const auto s = sigmoid(d, Mul(g, MulAdd(Set(d, k1), square, Set(d, k0)))), gelu = Mul(g, s);
    const auto inner = MulAdd(Set(d, 3 * k1), square, Set(d, k0));  // the slope of 2u
    const auto slope = MulAdd(Mul(gelu, Sub(Set(d, 1.0f), s)), inner, s);
    store(Mul(Mul(grad, u), slope), d, gate + i);
    store(Mul(grad, gelu), d, up + i);
    store(Mul(gelu, u), d, dy + i);
  });
}

template <class T>
void clamped_swiglu(const T* gate, const T* up, T* y, Size n, float alpha, float limit) {
  each(n, fetching(gate, up), [=](auto d, Size i) HWY_ATTR {
    const auto most = Set(d, limit), g = at_most(load(d, gate + i), most);
    const auto u = at_least(at_most(load(d, up + i), most), hn::Neg(most));
    store(Mul(Mul(g, sigmoid(d, Mul(Set(d, alpha), g))), Add(u, Set(d, 1.0f))), d, y + i);
  });
}

template <class T, class Y>
void clamped_swiglu_backward(T* gate, T* up, Y* dy, Size n, float alpha, float limit) {
  each(n, fetching(gate, up, dy), [=](auto d, Size i) HWY_ATTR {
    const auto most = Set(d, limit), one = Set(d, 1.0f), grad = load(d, dy + i);
    const auto gate_here = load(d, gate + i), up_here = load(d, up + i);
    const auto g = at_most(gate_here, most), turned = Mul(Set(d, alpha), g);
    const auto u = Add(at_least(at_most(up_here, most), hn::Neg(most)), one);
    const auto s = sigmoid(d, turned), opened = Mul(g, s);
    const auto slope = MulAdd(Mul(turned, Sub(one, s)), s, s);
    store(hn::IfThenZeroElse(hn::Gt(gate_here, most), Mul(Mul(grad, u), slope)), d, gate + i);
    store(hn::IfThenZeroElse(hn::Gt(hn::Abs(up_here), most), Mul(grad, opened)), d, up + i);
    store(Mul(opened, u), d, dy + i);
  });
}

template <class T>
WideGatedBackward<T>* gated_backward_wide(Activation a) {
  if (a == Activation::clamped_swiglu) return clamped_swiglu_backward<T, float>;
  return swiglu_backward<T, float>;
}

template <class T>
GatedPasses<T> gated(Activation a) {
  if (a == Activation::geglu) return {geglu<T>, geglu_backward<T>};
  if (a == Activation::clamped_swiglu) return {clamped_swiglu<T>, clamped_swiglu_backward<T, T>};
  return {swiglu<T>, swiglu_backward<T, T>};
}

// The factors of the two parameters of xIELU (rows::XieluOf): one of them is 0.
template <class D, class V>
HWY_INLINE V xielu_square(D d, V x) {
  return hn::IfThenElseZero(hn::Gt(x, Zero(d)), Mul(x, x));
}
template <class D, class V>
HWY_INLINE V xielu_bend(D d, V x) {
  const V below = at_most(x, Set(d, static_cast<float>(Xielu::largest)));
  return hn::IfThenZeroElse(hn::Gt(x, Zero(d)), Sub(hn::Expm1(d, below), x));
}

template <class T>
void xielu(const T* h, float above, float below, T* y, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto x = load(d, h + i);
    const auto bent =
        MulAdd(xielu_bend(d, x), Set(d, below), Mul(x, Set(d, static_cast<float>(Xielu::beta))));
    store(MulAdd(xielu_square(d, x), Set(d, above), bent), d, y + i);
  });
}

template <class T>
void xielu_backward(T* h, T* dy, float above, float below, float* sum_above, float* sum_below, Size n) {
  const Full d;
  const One last;
  auto aboves = Zero(d), belows = aboves;
  auto last_above = Zero(last), last_below = last_above;
  const auto make = [=](auto tag, Size i, auto& of_above, auto& of_below) HWY_ATTR {
    const auto x = load(tag, h + i), grad = load(tag, dy + i), zero = Zero(tag);
    const auto beta = Set(tag, static_cast<float>(Xielu::beta)), minus_one = Set(tag, -1.0f);
    const auto square = xielu_square(tag, x), bend = xielu_bend(tag, x);
    of_above = MulAdd(grad, square, of_above);
    of_below = MulAdd(grad, bend, of_below);
    const auto is_low = hn::Lt(x, Set(tag, static_cast<float>(Xielu::largest)));
    const auto slope_below = Add(hn::IfThenElseZero(is_low, exponential(tag, hn::Min(x, zero))), minus_one);
    const auto slope =
        hn::IfThenElse(hn::Gt(x, zero), Mul(Set(tag, 2 * above), x), Mul(Set(tag, below), slope_below));
    store(MulAdd(square, Set(tag, above), MulAdd(bend, Set(tag, below), Mul(x, beta))), tag, h + i);
    store(Mul(grad, Add(slope, beta)), tag, dy + i);
  };
  Size i = 0;
  for (; i + lanes(d) <= n; i += lanes(d)) make(d, i, aboves, belows);
  for (; i < n; ++i) make(last, i, last_above, last_below);
  *sum_above = hn::GetLane(hn::SumOfLanes(d, aboves)) + hn::GetLane(last_above);
  *sum_below = hn::GetLane(hn::SumOfLanes(d, belows)) + hn::GetLane(last_below);
}

template <class D, class V>
HWY_INLINE V open_of(D d, V gate) {
  return hn::IfThenElse(hn::IsNaN(gate), gate, sigmoid(d, gate));
}
template <class T>
void sigmoid_gate(const T* x, const T* gate, T* y, Size n) {
  each(n, fetching(x, gate),
       [=](auto d, Size i) HWY_ATTR { store(Mul(load(d, x + i), open_of(d, load(d, gate + i))), d, y + i); });
}
template <class T>
void sigmoid_gate_backward(const T* x, T* gate, T* dy, T* y, Size n) {
  each(n, fetching(x, gate, dy), [=](auto d, Size i) HWY_ATTR {
    const auto open = open_of(d, load(d, gate + i)), value = load(d, x + i), grad = load(d, dy + i);
    const auto made = Mul(value, open);
    store(made, d, y + i);
    store(Mul(Mul(grad, made), Sub(Set(d, 1.0f), open)), d, gate + i);
    store(Mul(grad, open), d, dy + i);
  });
}

template <class T>
void rotate(T* low, T* high, const float* cosine, const float* sine, float sign, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto a = load(d, low + i), b = load(d, high + i);
    const auto c = load(d, cosine + i), s = Mul(load(d, sine + i), Set(d, sign));
    store(NegMulAdd(b, s, Mul(a, c)), d, low + i);
    store(MulAdd(a, s, Mul(b, c)), d, high + i);
  });
}

float max(const float* x, Size n) {
  const Full d;
  auto a = Set(d, -std::numeric_limits<float>::infinity()), b = a;
  const Size step = lanes(d);
  Size i = 0;
  for (; i + 2 * step <= n; i += 2 * step) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + ahead);
    __builtin_prefetch(reinterpret_cast<const char*>(x + i + step) + ahead);
    a = hn::Max(a, load(d, x + i));
    b = hn::Max(b, load(d, x + i + step));
  }
  float result = hn::GetLane(hn::MaxOfLanes(d, hn::Max(a, b)));
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

void soft_cap(float* x, float cap, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    store(Mul(Set(d, cap), hn::Tanh(d, Mul(load(d, x + i), Set(d, 1.0f / cap)))), d, x + i);
  });
}

float exp_sum(float* x, float max, Size n) {
  return sum_of(n, [=](auto d, Size i) HWY_ATTR {
    const auto e = exponential(d, Sub(load(d, x + i), Set(d, max)));
    store(e, d, x + i);
    return e;
  });
}

// The new weights and v; m is stored.
template <class V>
struct AdamWStepped {
  V weights, square;
};
template <class D, class V, class T>
HWY_INLINE AdamWStepped<V> adamw_step(D d, V weights, const float* g, T* m, const T* v, const AdamWFactors& f,
                                      Size i) {
  const auto gradient = Mul(load(d, g + i), Set(d, f.gradient_scale));
  const auto mean = MulAdd(load(d, m + i), Set(d, f.beta1), Mul(gradient, Set(d, f.one_minus_beta1)));
  const auto square =
      MulAdd(load(d, v + i), Set(d, f.beta2), Mul(Mul(gradient, gradient), Set(d, f.one_minus_beta2)));
  const auto root = MulAdd(hn::Sqrt(square), Set(d, f.root_scale), Set(d, f.eps));
  const auto step = Div(Mul(mean, Set(d, f.rate)), root);
  store(mean, d, m + i);
  return {Sub(Mul(weights, Set(d, f.decay)), step), square};
}

void adamw(float* p, const float* g, float* m, float* v, const AdamWFactors& f, Size n) {
  each(n, fetching(p, g, m, v), [=](auto d, Size i) HWY_ATTR {
    const auto updated = adamw_step(d, load(d, p + i), g, m, v, f, i);
    store(updated.weights, d, p + i);
    store(updated.square, d, v + i);
  });
}

void adamw_split(bf16* p, std::int16_t* remainder, const float* g, float* m, float* v, const AdamWFactors& f,
                 Size n) {
  each(n, fetching(p, remainder, g, m, v), [=](auto d, Size i) HWY_ATTR {
    const auto updated = adamw_step(d, load_split(d, p + i, remainder + i), g, m, v, f, i);
    store_split(updated.weights, d, p + i, remainder + i);
    store(updated.square, d, v + i);
  });
}

// As bf16::stochastic() with the lower halves of `random`.
template <class D, class V, class W>
HWY_INLINE void store_at_random(V x, W random, D d, bf16* to) {
  const hn::RebindToUnsigned<D> words;
  const auto finite = hn::Lt(hn::Abs(x), Set(d, std::numeric_limits<float>::infinity()));
  const auto moved = Add(hn::BitCast(words, x), random);
  store_upper_half(hn::IfThenElse(hn::RebindMask(words, finite), moved, nearest_bf16(d, x)), d, to);
}

void adamw_at_random(bf16* p, const float* g, bf16* m, bf16* v, const std::uint32_t* random,
                     const AdamWFactors& f, Size n) {
  each(n, fetching(p, g, m, v), [=](auto d, Size i) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(d)> words;
    const auto updated = adamw_step(d, load(d, p + i), g, m, v, f, i);
    const auto word = hn::LoadU(words, random + i);
    store_at_random(updated.weights, hn::ShiftRight<16>(word), d, p + i);
    store_at_random(updated.square, hn::And(word, Set(words, 0xffffu)), d, v + i);
  });
}

template <class T>
float softmax_row(const float* s, Size visible, Size n, float* max, float* sum, T* p) {
  const Full d;
  const Size step = lanes(d);
  if (visible <= 0) {
    for (Size i = 0; i < n; i += step) store(Zero(d), d, p + i);
    return 1.0f;
  }
  // The last vector is cut by a mask; the row has room for all of it.
  const Size whole = visible / step * step;
  const auto seen = hn::FirstN(d, static_cast<std::size_t>(visible - whole));
  auto top = Set(d, *max), top2 = top;
  Size i = 0;
  for (; i + 2 * step <= whole; i += 2 * step) {
    top = hn::Max(top, load(d, s + i));
    top2 = hn::Max(top2, load(d, s + i + step));
  }
  if (i < whole) top = hn::Max(top, load(d, s + i));
  if (whole < visible) top2 = hn::Max(top2, hn::IfThenElse(seen, load(d, s + whole), Set(d, kUnseen)));
  const float new_max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(top, top2)));
  auto total = Zero(d);
  for (i = 0; i < whole; i += step) {
    const auto e = exponential(d, Sub(load(d, s + i), Set(d, new_max)));
    store(e, d, p + i);
    total = Add(total, e);
  }
  if (whole < visible) {
    const auto e = hn::IfThenElseZero(seen, exponential(d, Sub(load(d, s + whole), Set(d, new_max))));
    store(e, d, p + whole);
    total = Add(total, e);
    i += step;
  }
  for (; i < n; i += step) store(Zero(d), d, p + i);
  const float correction = std::exp(*max - new_max);
  *max = new_max;
  *sum = *sum * correction + hn::GetLane(hn::SumOfLanes(d, total));
  return correction;
}

template <bool capped, class T>
HWY_INLINE void gradient_row(const float* s, const float* dp, Size visible, Size n, float lse, float delta,
                             float cap, T* p, T* ds) {
  const Full d;
  const Size step = lanes(d);
  const auto bent = [=](Size i) HWY_ATTR {
    if constexpr (capped)
      return hn::Tanh(d, Mul(load(d, s + i), Set(d, 1.0f / cap)));
    else
      return load(d, s + i);
  };
  const auto weight = [=](auto b) HWY_ATTR {
    if constexpr (capped)
      return exponential(d, Sub(Mul(b, Set(d, cap)), Set(d, lse)));
    else
      return exponential(d, Sub(b, Set(d, lse)));
  };
  const auto gradient = [=](Size i, auto b, auto e) HWY_ATTR {
    const auto behind = Mul(e, Sub(load(d, dp + i), Set(d, delta)));
    if constexpr (capped)
      return Mul(behind, NegMulAdd(b, b, Set(d, 1.0f)));
    else
      return behind;
  };
  Size i = 0;
  for (; i + step <= visible; i += step) {
    const auto b = bent(i), e = weight(b), g = gradient(i, b, e);
    store(e, d, p + i);
    store(g, d, ds + i);
  }
  // The last vector may extend beyond the visible part.
  if (i < visible) {
    const auto seen = hn::FirstN(d, static_cast<std::size_t>(visible - i));
    const auto b = bent(i), e = weight(b), g = gradient(i, b, e);
    store(hn::IfThenElseZero(seen, e), d, p + i);
    store(hn::IfThenElseZero(seen, g), d, ds + i);
    i += step;
  }
  for (; i < n; i += step) {
    store(Zero(d), d, p + i);
    store(Zero(d), d, ds + i);
  }
}

template <class T>
void softmax_gradient_row(const float* s, const float* dp, Size visible, Size n, float lse, float delta, T* p,
                          T* ds) {
  gradient_row<false>(s, dp, visible, n, lse, delta, 0, p, ds);
}

template <class T>
void capped_softmax_gradient_row(const float* s, const float* dp, Size visible, Size n, float lse,
                                 float delta, float cap, T* p, T* ds) {
  gradient_row<true>(s, dp, visible, n, lse, delta, cap, p, ds);
}

template <class T>
void scale_capped(const float* p, float factor, float max, float cap, T* y, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto v = load(d, p + i);
    const auto bent = Mul(Add(Set(d, max), hn::Log(d, v)), Set(d, 1.0f / cap));
    store(Mul(Mul(v, Set(d, factor)), NegMulAdd(bent, bent, Set(d, 1.0f))), d, y + i);
  });
}

template <class T>
constexpr Simd<T> passes{.add = add<T, T>,
                         .add_to_wide = add<T, float>,
                         .add_wide = add<float, T>,
                         .add_scaled = add_scaled<T>,
                         .widen = copy<T, float>,
                         .narrow = copy<float, T>,
                         .scale = scaled<T, T>,
                         .scale_wide = scaled<float, T>,
                         .sum_squares = sum_squares<T>,
                         .all_finite = all_finite<T>,
                         .sum_squares_exactly = sum_squares_exactly<T>,
                         .largest = largest<T>,
                         .round_to_fp8 = round_to_fp8<T>,
                         .dot = dot<T>,
                         .residual = residual<T>,
                         .short_convolution = short_convolution<T>,
                         .short_convolution_backward = short_convolution_backward<T>,
                         .short_convolution_taps = short_convolution_taps<T>,
                         .column_sums = column_sums<T>,
                         .layer_norm = layer_norm<T>,
                         .layer_norm_again = layer_norm_again<T>,
                         .layer_norm_dx = layer_norm_dx<T>,
                         .layer_norm_dw = layer_norm_dw<T>,
                         .rms_norm = rms_norm<T>,
                         .rms_norm_again = rms_norm_again<T>,
                         .rms_norm_dx = rms_norm_dx<T>,
                         .rms_norm_dx_sum = rms_norm_dx_sum<T>,
                         .rms_norm_dx_of = rms_norm_dx_of<T>,
                         .rms_norm_dw = rms_norm_dw<T>,
                         .activation = activation<T>,
                         .gated = gated<T>,
                         .gated_backward_wide = gated_backward_wide<T>,
                         .xielu = xielu<T>,
                         .xielu_backward = xielu_backward<T>,
                         .sigmoid_gate = sigmoid_gate<T>,
                         .sigmoid_gate_backward = sigmoid_gate_backward<T>,
                         .rotate = rotate<T>,
                         .softmax_row = softmax_row<T>,
                         .softmax_gradient_row = softmax_gradient_row<T>,
                         .capped_softmax_gradient_row = capped_softmax_gradient_row<T>,
                         .scale_capped = scale_capped<T>};

constexpr WideSimd wide_passes{.max = max,
                               .soft_cap = soft_cap,
                               .exp_sum = exp_sum,
                               .adamw = adamw,
                               .adamw_split = adamw_split,
                               .adamw_at_random = adamw_at_random};

}  // namespace

const Simd<float>* f32_passes() { return &passes<float>; }
const Simd<bf16>* bf16_passes() { return &passes<bf16>; }
const WideSimd* passes_on_wide() { return &wide_passes; }

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace echelon {

void on_each_instruction_set(const std::function<void(const char*)>& body) {
  const auto choose = [](std::int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    choose(target);
    body(hwy::TargetName(target));
  }
  choose(0);
}

HWY_EXPORT(f32_passes);
HWY_EXPORT(bf16_passes);
HWY_EXPORT(passes_on_wide);

template <>
const Simd<float>& simd<float>() {
  return *HWY_DYNAMIC_DISPATCH(f32_passes)();
}
template <>
const Simd<bf16>& simd<bf16>() {
  return *HWY_DYNAMIC_DISPATCH(bf16_passes)();
}
const WideSimd& wide_simd() { return *HWY_DYNAMIC_DISPATCH(passes_on_wide)(); }

}  // namespace echelon
#endif
