#include "tensor/simd.h"

#include <algorithm>
#include <bit>

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd_elements.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

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

template <class T>
void rotate(T* low, T* high, const float* cosine, const float* sine, float sign, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto a = load(d, low + i), b = load(d, high + i);
    const auto c = load(d, cosine + i), s = Mul(load(d, sine + i), Set(d, sign));
    store(NegMulAdd(b, s, Mul(a, c)), d, low + i);
    store(MulAdd(a, s, Mul(b, c)), d, high + i);
  });
}

}  // namespace

template <class T>
const ElementSimd<T>& element_simd() {
  static constexpr ElementSimd<T> passes{.add = add<T, T>,
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
                                         .column_sums = column_sums<T>,
                                         .rotate = rotate<T>};
  return passes;
}
template const ElementSimd<float>& element_simd();
template const ElementSimd<bf16>& element_simd();

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();
