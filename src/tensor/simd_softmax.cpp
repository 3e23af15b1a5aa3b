#include "tensor/simd.h"

#include <cmath>
#include <limits>

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd_softmax.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include "tensor/simd_exponential-inl.h"
#include "tensor/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

constexpr float kUnseen = -std::numeric_limits<float>::infinity();  // as a score

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

void lower(float* x, float slope, Size first, Size step, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    const auto distance = MulAdd(hn::Iota(d, static_cast<float>(i)), Set(d, -static_cast<float>(step)),
                                 Set(d, static_cast<float>(first)));
    store(hn::NegMulAdd(distance, Set(d, slope), load(d, x + i)), d, x + i);
  });
}

float exp_sum(float* x, float max, Size n) {
  return sum_of(n, [=](auto d, Size i) HWY_ATTR {
    const auto e = exponential(d, Sub(load(d, x + i), Set(d, max)));
    store(e, d, x + i);
    return e;
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

}  // namespace

template <class T>
const SoftmaxSimd<T>& softmax_simd() {
  static constexpr SoftmaxSimd<T> passes{.softmax_row = softmax_row<T>,
                                         .softmax_gradient_row = softmax_gradient_row<T>,
                                         .capped_softmax_gradient_row = capped_softmax_gradient_row<T>,
                                         .scale_capped = scale_capped<T>};
  return passes;
}
template const SoftmaxSimd<float>& softmax_simd();
template const SoftmaxSimd<bf16>& softmax_simd();

const LogitsSimd& logits_simd() {
  static constexpr LogitsSimd passes{.max = max, .soft_cap = soft_cap, .lower = lower, .exp_sum = exp_sum};
  return passes;
}

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();
