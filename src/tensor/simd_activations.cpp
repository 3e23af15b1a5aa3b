#include "tensor/simd.h"

#include "base/error.h"

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd_activations.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include "tensor/simd_exponential-inl.h"
#include "tensor/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

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

}  // namespace

template <class T>
const ActivationSimd<T>& activation_simd() {
  static constexpr ActivationSimd<T> passes{.activation = activation<T>,
                                            .gated = gated<T>,
                                            .gated_backward_wide = gated_backward_wide<T>,
                                            .xielu = xielu<T>,
                                            .xielu_backward = xielu_backward<T>,
                                            .sigmoid_gate = sigmoid_gate<T>,
                                            .sigmoid_gate_backward = sigmoid_gate_backward<T>};
  return passes;
}
template const ActivationSimd<float>& activation_simd();
template const ActivationSimd<bf16>& activation_simd();

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();
