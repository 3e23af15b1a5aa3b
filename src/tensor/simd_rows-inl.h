// Going over the elements of a row by vectors, for files of passes that Highway compiles once for each
// instruction set.
#if defined(ECHELON_SIMD_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ECHELON_SIMD_ROWS_INL_H
#undef ECHELON_SIMD_ROWS_INL_H
#else
#define ECHELON_SIMD_ROWS_INL_H
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

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

template <class T>
float dot(const T* x, const T* y, Size n) {
  return sum_of(n, [=](auto d, Size i) HWY_ATTR { return Mul(load(d, x + i), load(d, y + i)); });
}

// How many rows a column sum reads at once: several streams read memory faster than one.
constexpr Size streams = 8;

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#endif
