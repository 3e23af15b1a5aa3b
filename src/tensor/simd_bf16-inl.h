// Loads and stores vectors of floats from and to memory of floats or bf16, for files that Highway compiles
// once for each instruction set.
#if defined(ECHELON_SIMD_BF16_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ECHELON_SIMD_BF16_INL_H
#undef ECHELON_SIMD_BF16_INL_H
#else
#define ECHELON_SIMD_BF16_INL_H
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "base/bf16.h"
#include "base/split_weight.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// As many elements as d has lanes: bf16 is widened when loaded, and rounded to nearest, ties to even, when
// stored.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* x) {
  return hn::LoadU(d, x);
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const bf16* x) {
  const hn::RebindToUnsigned<D> whole;
  const hn::Rebind<std::uint16_t, D> half;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(whole, hn::LoadU(half, &x->bits))));
}
template <class D, class V>
HWY_INLINE void store(V v, D d, float* x) {
  hn::StoreU(v, d, x);
}
template <class D, class V>
HWY_INLINE void store_upper_half(V whole, D, bf16* x) {  // of each 32-bit word
  const hn::Rebind<std::uint16_t, D> half;
  const hn::RebindToSigned<D> small;  // below 2^16, which no conversion has to cut
  hn::StoreU(hn::DemoteTo(half, hn::BitCast(small, hn::ShiftRight<16>(whole))), half, &x->bits);
}
template <class D, class V>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> nearest_bf16(D, V v) {  // in the upper halves
  const hn::RebindToUnsigned<D> words;
  const auto whole = hn::BitCast(words, v);
  const auto odd = hn::And(hn::ShiftRight<16>(whole), hn::Set(words, 1u));
  const auto rounded = hn::Add(hn::Add(whole, hn::Set(words, 0x7fffu)), odd);
  // A NaN whose payload lies in the lower half must not become infinity.
  const auto quiet = hn::Or(whole, hn::Set(words, 0x400000u));
  return hn::IfThenElse(hn::RebindMask(words, hn::IsNaN(v)), quiet, rounded);
}
template <class D, class V>
HWY_INLINE void store(V v, D d, bf16* x) {
  store_upper_half(nearest_bf16(d, v), d, x);
}

// Weights in f32 from their values and remainders, and back (base/split_weight.h).
template <class D>
HWY_INLINE hn::Vec<D> load_split(D d, const bf16* value, const std::int16_t* remainder) {
  const hn::RebindToSigned<D> words;
  const hn::Rebind<std::int16_t, D> half;
  const auto rounded = hn::BitCast(words, load(d, value));
  return hn::BitCast(d, hn::Add(rounded, hn::PromoteTo(words, hn::LoadU(half, remainder))));
}
template <class D, class V>
HWY_INLINE void store_split(V weights, D d, bf16* value, std::int16_t* remainder) {
  const hn::RebindToUnsigned<D> words;
  const hn::RebindToSigned<D> numbers;
  const hn::Rebind<std::int16_t, D> half;
  const auto is_nan = hn::RebindMask(words, hn::IsNaN(weights));
  const auto whole = hn::BitCast(words, weights);
  const auto rounded = hn::Add(whole, hn::Set(words, 0x8000u));
  const auto quiet = hn::Or(whole, hn::Set(words, 0x400000u));
  store_upper_half(hn::IfThenElse(is_nan, quiet, rounded), d, value);
  // The lower half with its sign, which no conversion has to cut.
  const auto left = hn::ShiftRight<16>(hn::BitCast(numbers, hn::ShiftLeft<16>(whole)));
  hn::StoreU(hn::DemoteTo(half, hn::IfThenZeroElse(hn::RebindMask(numbers, is_nan), left)), half, remainder);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#endif
