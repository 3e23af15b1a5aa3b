#include "tensor/simd.h"

#include <limits>

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd_updates.cpp"
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

template <class M, class T>
void momentum(const float* g, M* m, T* update, float momentum, float gradient_scale, Size n) {
  each(n, fetching(g, m), [=](auto d, Size i) HWY_ATTR {
    const auto gradient = Mul(load(d, g + i), Set(d, gradient_scale));
    const auto mean = MulAdd(load(d, m + i), Set(d, momentum), gradient);
    store(mean, d, m + i);
    store(MulAdd(mean, Set(d, momentum), gradient), d, update + i);
  });
}

template <class D, class V, class T>
HWY_INLINE V stepped(D d, V weights, const T* update, float keep, float rate, Size i) {
  return Sub(Mul(weights, Set(d, keep)), Mul(load(d, update + i), Set(d, rate)));
}

void step_weights(float* p, const float* update, float keep, float rate, Size n) {
  each(n, fetching(p, update),
       [=](auto d, Size i) HWY_ATTR { store(stepped(d, load(d, p + i), update, keep, rate, i), d, p + i); });
}

void step_weights_split(bf16* p, std::int16_t* remainder, const bf16* update, float keep, float rate,
                        Size n) {
  each(n, fetching(p, remainder, update), [=](auto d, Size i) HWY_ATTR {
    store_split(stepped(d, load_split(d, p + i, remainder + i), update, keep, rate, i), d, p + i,
                remainder + i);
  });
}

void step_weights_at_random(bf16* p, const bf16* update, const std::uint32_t* random, float keep, float rate,
                            Size n) {
  each(n, fetching(p, update), [=](auto d, Size i) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(d)> words;
    const auto word = hn::LoadU(words, random + i);
    store_at_random(stepped(d, load(d, p + i), update, keep, rate, i), hn::ShiftRight<16>(word), d, p + i);
  });
}

}  // namespace

const UpdateSimd& update_simd() {
  static constexpr UpdateSimd passes{.adamw = adamw,
                                     .adamw_split = adamw_split,
                                     .adamw_at_random = adamw_at_random,
                                     .momentum = momentum<float, float>,
                                     .momentum_to_bf16 = momentum<float, bf16>,
                                     .momentum_in_bf16 = momentum<bf16, bf16>,
                                     .step_weights = step_weights,
                                     .step_weights_split = step_weights_split,
                                     .step_weights_at_random = step_weights_at_random};
  return passes;
}

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();
