// What is between the two products of an MLP (spec/activation.h), and its gradients.
#pragma once

#include <cmath>
#include <type_traits>

#include "base/bf16.h"
#include "spec/activation.h"
#include "tensor/rows/columns.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// For x >= 1, including infinity.
ECHELON_HOST_DEVICE inline double reciprocal(double x) { return 1 / x; }
ECHELON_HOST_DEVICE inline float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;  // to one unit in the last place, with one instruction instead of ten
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1 / x;
#endif
}

template <class F>
ECHELON_HOST_DEVICE F sigmoid(F x) {
  return reciprocal(1 + std::exp(-x));
}

// An activation's value and slope at x.
template <class F>
struct AtPoint {
  F y, slope;
};

// As x sigmoid(2u), which equals x (1 + tanh(u)) / 2, with u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class F>
struct GeluTanh {
  static constexpr F linear = F(1.595769121605730711759542397382635471);  // 2 sqrt(2 / pi)
  static constexpr F cubic = linear * F(0.044715);
  ECHELON_HOST_DEVICE static F y(F x) { return x * sigmoid(x * (linear + cubic * (x * x))); }
  ECHELON_HOST_DEVICE static AtPoint<F> at(F x) {
    // Beyond this square the sigmoid is 0 or 1 anyway; the limit avoids a NaN from infinity times 0.
    constexpr F largest = F(1e4);
    const F square = x * x < largest ? x * x : largest, open = sigmoid(x * (linear + cubic * square));
    return {x * open, open + x * (open * (1 - open)) * (linear + 3 * cubic * square)};
  }
};
template <class F>
ECHELON_HOST_DEVICE F gelu_of(F x) {
  return GeluTanh<F>::y(x);
}
template <class F>
ECHELON_HOST_DEVICE F gelu_slope(F x) {
  return GeluTanh<F>::at(x).slope;
}

template <class F>
ECHELON_HOST_DEVICE F normal_distribution(F x) {
  return F(0.5) * (1 + std::erf(x * F(0.707106781186547524400844362104849039)));
}

// For an activation without a gate.
template <class F>
ECHELON_HOST_DEVICE F activation_of(Activation a, F x) {
  const F positive = x < F(0) ? F(0) : x;
  if (a == Activation::gelu_erf) return x * normal_distribution(x);
  if (a == Activation::relu) return positive;
  return a == Activation::relu2 ? positive * positive : gelu_of(x);
}
template <class F>
ECHELON_HOST_DEVICE AtPoint<F> activation_at(Activation a, F x) {
  if (a == Activation::gelu_erf) {
    constexpr F density = F(0.398942280401432677939946059934381868);  // 1 / sqrt(2 pi)
    const F below = normal_distribution(x);
    return {x * below, below + x * density * std::exp(F(-0.5) * x * x)};
  }
  const F positive = x < F(0) ? F(0) : x;
  if (a == Activation::relu) return {positive, x > F(0) ? F(1) : F(0)};
  if (a == Activation::relu2) return {positive * positive, 2 * positive};
  return GeluTanh<F>::at(x);
}

// Calls call(constant) with `a` as a compile-time constant, so that loops over elements have no branch.
template <class Call>
ECHELON_HOST_DEVICE void with_constant(Activation a, const Call& call) {
  if (a == Activation::gelu_erf) return call(std::integral_constant<Activation, Activation::gelu_erf>());
  if (a == Activation::relu) return call(std::integral_constant<Activation, Activation::relu>());
  if (a == Activation::relu2) return call(std::integral_constant<Activation, Activation::relu2>());
  call(std::integral_constant<Activation, Activation::gelu>());
}
template <class Call>
ECHELON_HOST_DEVICE void with_constant_gate(Activation a, const Call& call) {
  if (a == Activation::geglu) return call(std::integral_constant<Activation, Activation::geglu>());
  if (a == Activation::clamped_swiglu)
    return call(std::integral_constant<Activation, Activation::clamped_swiglu>());
  call(std::integral_constant<Activation, Activation::swiglu>());
}

// clamped_swiglu of one gate and one input, and its parts.
template <class F>
struct ClampedSwiglu {
  F gate, up;  // clamped; up with 1 added
  F open;
  F alpha;
  ECHELON_HOST_DEVICE ClampedSwiglu(F gate_at, F up_at, const SwigluClamp& clamp) : alpha(F(clamp.alpha)) {
    const F limit = F(clamp.limit);
    gate = limit < gate_at ? limit : gate_at;
    up = (limit < up_at ? limit : up_at < -limit ? -limit : up_at) + 1;
    open = sigmoid(alpha * gate);
  }
  ECHELON_HOST_DEVICE F y() const { return gate * open * up; }
  ECHELON_HOST_DEVICE F slope() const { return up * open * (1 + alpha * gate * (1 - open)); }
};

// The value of a gated activation.
template <class F>
ECHELON_HOST_DEVICE F gated_of(Activation a, F gate, F up, const SwigluClamp& clamp) {
  if (a == Activation::clamped_swiglu) return ClampedSwiglu<F>(gate, up, clamp).y();
  return (a == Activation::geglu ? gelu_of(gate) : gate * sigmoid(gate)) * up;
}

// The value, and the gradients of gate and up, for the gradient d of y.
template <class F>
struct GatedGradient {
  F y, d_gate, d_up;
};
template <class F>
ECHELON_HOST_DEVICE GatedGradient<F> gated_gradient(Activation a, F gate, F up, F d,
                                                    const SwigluClamp& clamp) {
  if (a == Activation::clamped_swiglu) {
    const ClampedSwiglu<F> at(gate, up, clamp);
    const F limit = F(clamp.limit);
    return {at.y(), limit < gate ? F(0) : d * at.slope(),
            limit < up || up < -limit ? F(0) : d * at.gate * at.open};
  }
  if (a == Activation::geglu) {
    const AtPoint<F> at = GeluTanh<F>::at(gate);
    return {at.y * up, d * up * at.slope, d * at.y};
  }
  const F open = sigmoid(gate);
  return {gate * open * up, d * up * open * (1 + gate * (1 - open)), d * gate * open};
}

template <class T>
struct Activate {
  static constexpr int columns = columns_of<T>;
  Activation a;
  Matrix<T> h, y;
  bool is_aligned() const { return are_aligned<columns>(h, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto x = at.read(h[i]);
    with_constant(a,
                  [&](auto of) { at.write(y[i], [&](int k) { return activation_of<Wide<T>>(of, x[k]); }); });
  }
};

// The same with a bias, which is added to h in place.
template <class T>
struct ActivateBiased {
  static constexpr int columns = columns_of<T>;
  Activation a;
  Matrix<T> h;
  const T* bias;
  Matrix<T> y;
  bool is_aligned() const { return are_aligned<columns>(h, bias, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto of_h = at.read(h[i]), b = at.read(bias);
    const auto x = at.write(h[i], [&](int k) { return of_h[k] + b[k]; });
    with_constant(a,
                  [&](auto of) { at.write(y[i], [&](int k) { return activation_of<Wide<T>>(of, x[k]); }); });
  }
};

template <class T>
struct ActivateBackward {
  static constexpr int columns = columns_of<T>;
  Activation a;
  Matrix<T> h, dy;
  bool is_aligned() const { return are_aligned<columns>(h, dy); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    using F = Wide<T>;
    const auto x = at.read(h[i]), d = at.read(dy[i]);
    with_constant(a, [&](auto of) {
      AtPoint<F> points[N];
      for (int k = 0; k < N; ++k) points[k] = activation_at<F>(of, x[k]);
      at.write(dy[i], [&](int k) { return d[k] * points[k].slope; });
      at.write(h[i], [&](int k) { return points[k].y; });
    });
  }
};

// xIELU with its two parameters.
template <class F>
struct XieluOf {
  F above, below;
  template <class T>
  ECHELON_HOST_DEVICE explicit XieluOf(const T* alphas)
      : above(softplus(F(alphas[0]))), below(F(Xielu::beta) + softplus(F(alphas[1]))) {}
  ECHELON_HOST_DEVICE static F softplus(F x) {
    return (x > F(0) ? x : F(0)) + std::log1p(std::exp(x > F(0) ? -x : x));
  }
  // The factors of `above` and of `below`: one of them is 0.
  ECHELON_HOST_DEVICE static F square(F x) { return x > F(0) ? x * x : F(0); }
  ECHELON_HOST_DEVICE static F bend(F x) {
    constexpr F largest = F(Xielu::largest);
    return x > F(0) ? F(0) : std::expm1(x < largest ? x : largest) - x;
  }
  ECHELON_HOST_DEVICE F y(F x) const { return above * square(x) + below * bend(x) + F(Xielu::beta) * x; }
  ECHELON_HOST_DEVICE F slope(F x) const {
    if (x > F(0)) return 2 * above * x + F(Xielu::beta);
    return below * ((x < F(Xielu::largest) ? std::exp(x) : F(0)) - 1) + F(Xielu::beta);
  }
};

template <class T>
struct XieluForward {
  Matrix<T> h;
  const T* alphas;
  Matrix<T> y;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const XieluOf<Wide<T>> of(alphas);
    for (std::int64_t j = team.lane(); j < h.cols; j += team.lanes()) y[i][j] = T(of.y(h[i][j]));
  }
};

template <class T>
struct XieluBackward {
  Matrix<T> h;
  const T* alphas;
  Matrix<T> dy;
  Wide<T>* dalphas;  // two of each row
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const XieluOf<F> of(alphas);
    F above = 0, below = 0;
    for (std::int64_t j = team.lane(); j < h.cols; j += team.lanes()) {
      const F x = h[i][j], d = dy[i][j];
      above += d * of.square(x);
      below += d * of.bend(x);
      h[i][j] = T(of.y(x));
      dy[i][j] = T(d * of.slope(x));
    }
    above = sum_of(team, above);
    below = sum_of(team, below);
    if (team.lane() != 0) return;
    dalphas[2 * i] = above * sigmoid(F(alphas[0]));
    dalphas[2 * i + 1] = below * sigmoid(F(alphas[1]));
  }
};

template <class T>
struct Gated {
  static constexpr int columns = columns_of<T>;
  Activation a;
  SwigluClamp clamp;
  Matrix<T> gate_up, y;
  bool is_aligned() const { return are_aligned<columns>(gate_up, y) && y.cols % columns == 0; }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto gate = at.read(gate_up[i]), up = at.read(gate_up[i] + y.cols);
    with_constant_gate(a, [&](auto of) {
      at.write(y[i], [&](int k) { return gated_of<Wide<T>>(of, gate[k], up[k], clamp); });
    });
  }
};

// On exit, gate and up hold their gradients, and dy holds y.
template <class T>
struct GatedBackward {
  static constexpr int columns = columns_of<T>;
  Activation a;
  SwigluClamp clamp;
  Matrix<T> gate_up, dy;
  bool is_aligned() const { return are_aligned<columns>(gate_up, dy) && dy.cols % columns == 0; }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    using F = Wide<T>;
    const auto gate = at.read(gate_up[i]), up = at.read(gate_up[i] + dy.cols), d = at.read(dy[i]);
    with_constant_gate(a, [&](auto of) {
      GatedGradient<F> of_columns[N];
      for (int k = 0; k < N; ++k) of_columns[k] = gated_gradient<F>(of, gate[k], up[k], d[k], clamp);
      at.write(gate_up[i], [&](int k) { return of_columns[k].d_gate; });
      at.write(gate_up[i] + dy.cols, [&](int k) { return of_columns[k].d_up; });
      at.write(dy[i], [&](int k) { return of_columns[k].y; });
    });
  }
};

template <class T>
struct SigmoidGate {
  Matrix<T> x, gate, y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    using F = Wide<T>;
    y[i][j] = T(F(x[i][j]) * sigmoid(F(gate[i][j])));
  }
};
template <class T>
struct SigmoidGateBackward {
  Matrix<T> x, gate, dy, y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    using F = Wide<T>;
    const F open = sigmoid(F(gate[i][j])), value = F(x[i][j]), d = F(dy[i][j]);
    y[i][j] = T(value * open);
    gate[i][j] = T(d * value * open * (F(1) - open));
    dy[i][j] = T(d * open);
  }
};

template <class T>
struct WeightedActivationBackward {
  static constexpr int columns = columns_of<T>;
  Activation a;
  SwigluClamp clamp;
  Matrix<T> hidden, dy;
  const Wide<T>* weights;
  Wide<T>* dweights;
  // The output of the hidden columns; then they become their gradients, where the gradient of a column's
  // output is `d` times the weight.
  template <int N, class Number>
  ECHELON_HOST_DEVICE void take(T* row, Columns<N> at, const Number& d, Wide<T> (&y)[N]) const {
    using F = Wide<T>;
    const auto x = at.read(row);
    if (is_gated(a)) {
      const auto up = at.read(row + dy.cols);
      with_constant_gate(a, [&](auto of) {
        GatedGradient<F> of_columns[N];
        for (int k = 0; k < N; ++k) of_columns[k] = gated_gradient<F>(of, x[k], up[k], d(k), clamp);
        at.write(row, [&](int k) { return of_columns[k].d_gate; });
        at.write(row + dy.cols, [&](int k) { return of_columns[k].d_up; });
        for (int k = 0; k < N; ++k) y[k] = of_columns[k].y;
      });
    } else {
      with_constant(a, [&](auto of) {
        AtPoint<F> points[N];
        for (int k = 0; k < N; ++k) points[k] = activation_at<F>(of, x[k]);
        at.write(row, [&](int k) { return d(k) * points[k].slope; });
        for (int k = 0; k < N; ++k) y[k] = points[k].y;
      });
    }
  }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const bool whole = are_aligned<columns>(hidden, dy) && (!is_gated(a) || dy.cols % columns == 0);
    const LaneColumns<Team, columns> mine(team, dy.cols, whole);
    const F weight = weights[i];
    F sum = 0;
    mine.each([&](auto at, int) {
      constexpr int n = decltype(at)::count;
      const auto d = at.read(dy[i]);
      F y[n];
      take(
          hidden[i], at, [&](int k) { return d[k] * weight; }, y);
      for (int k = 0; k < n; ++k) sum += d[k] * y[k];
      at.write(dy[i], [&](int k) { return y[k] * weight; });
    });
    sum = sum_of(team, sum);
    if (team.lane() == 0) dweights[i] = sum;
  }
};

}  // namespace echelon::rows
