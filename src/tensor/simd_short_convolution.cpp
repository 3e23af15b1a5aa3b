#include "tensor/simd.h"

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd_short_convolution.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

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

}  // namespace

template <class T>
const ShortConvolutionSimd<T>& short_convolution_simd() {
  static constexpr ShortConvolutionSimd<T> passes{.short_convolution = short_convolution<T>,
                                                  .short_convolution_backward = short_convolution_backward<T>,
                                                  .short_convolution_taps = short_convolution_taps<T>};
  return passes;
}
template const ShortConvolutionSimd<float>& short_convolution_simd();
template const ShortConvolutionSimd<bf16>& short_convolution_simd();

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();
