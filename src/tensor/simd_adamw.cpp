#include "tensor/simd.h"

#include <limits>

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd_adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

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

}  // namespace

const AdamWSimd& adamw_simd() {
  static constexpr AdamWSimd passes{
      .adamw = adamw, .adamw_split = adamw_split, .adamw_at_random = adamw_at_random};
  return passes;
}

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();
