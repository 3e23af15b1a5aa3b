// e^x and the sigmoid of a vector of floats, for files of passes that Highway compiles once for each
// instruction set.
#if defined(ECHELON_SIMD_EXPONENTIAL_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ECHELON_SIMD_EXPONENTIAL_INL_H
#undef ECHELON_SIMD_EXPONENTIAL_INL_H
#else
#define ECHELON_SIMD_EXPONENTIAL_INL_H
#endif

#include <hwy/highway.h>

#include "tensor/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#endif
