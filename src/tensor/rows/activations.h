// What stands between the two products of an MLP (spec/activation.h), and its gradients.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "spec/activation.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

template <class F>
ECHELON_HOST_DEVICE F gelu_tanh_argument(F x) {
  constexpr F c = F(0.797884560802865355879892119868763737);  // sqrt(2 / pi)
  return c * (x + F(0.044715) * x * x * x);
}

template <class F>
ECHELON_HOST_DEVICE F gelu_of(F x) {
  return F(0.5) * x * (1 + std::tanh(gelu_tanh_argument(x)));
}

template <class F>
ECHELON_HOST_DEVICE F gelu_slope(F x) {
  constexpr F c = F(0.797884560802865355879892119868763737);
  const F tanh = std::tanh(gelu_tanh_argument(x));
  return F(0.5) * (1 + tanh) + F(0.5) * x * (1 - tanh * tanh) * c * (1 + 3 * F(0.044715) * x * x);
}

template <class F>
ECHELON_HOST_DEVICE F normal_distribution(F x) {
  return F(0.5) * (1 + std::erf(x * F(0.707106781186547524400844362104849039)));
}

template <class F>
ECHELON_HOST_DEVICE F gelu_erf_slope(F x) {
  constexpr F density = F(0.398942280401432677939946059934381868);  // 1 / sqrt(2 pi)
  return normal_distribution(x) + x * density * std::exp(F(-0.5) * x * x);
}

// Of an activation without a gate.
template <class F>
ECHELON_HOST_DEVICE F activation_of(Activation a, F x) {
  const F positive = x < F(0) ? F(0) : x;
  if (a == Activation::gelu_erf) return x * normal_distribution(x);
  return a == Activation::relu2 ? positive * positive : gelu_of(x);
}

template <class F>
ECHELON_HOST_DEVICE F activation_slope(Activation a, F x) {
  if (a == Activation::gelu_erf) return gelu_erf_slope(x);
  return a == Activation::relu2 ? 2 * (x < F(0) ? F(0) : x) : gelu_slope(x);
}

template <class F>
ECHELON_HOST_DEVICE F sigmoid(F x) {
  return 1 / (1 + std::exp(-x));
}

// clamped_swiglu of one gate and of what it opens, and its parts.
template <class F>
struct ClampedSwiglu {
  F gate, up;  // brought to the limit, and up with 1 added
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

// What an activation with a gate makes of it and of what it opens.
template <class F>
ECHELON_HOST_DEVICE F gated_of(Activation a, F gate, F up, const SwigluClamp& clamp) {
  if (a == Activation::clamped_swiglu) return ClampedSwiglu<F>(gate, up, clamp).y();
  return (a == Activation::geglu ? gelu_of(gate) : gate * sigmoid(gate)) * up;
}

// On entry gate, up and d, the gradient of y; on exit gate and up are their gradients. Returns y. (T is what
// they are stored as.)
template <class T, class F>
ECHELON_HOST_DEVICE F gated_gradient(Activation a, T& gate_at, T& up_at, F d, const SwigluClamp& clamp) {
  const F gate = gate_at, up = up_at;
  if (a == Activation::clamped_swiglu) {
    const ClampedSwiglu<F> at(gate, up, clamp);
    const F limit = F(clamp.limit);
    gate_at = T(limit < gate ? F(0) : d * at.slope());
    up_at = T(limit < up || up < -limit ? F(0) : d * at.gate * at.open);
    return at.y();
  }
  if (a == Activation::geglu) {
    gate_at = T(d * up * gelu_slope(gate));
    up_at = T(d * gelu_of(gate));
    return gelu_of(gate) * up;
  }
  const F open = sigmoid(gate);
  gate_at = T(d * up * open * (1 + gate * (1 - open)));
  up_at = T(d * gate * open);
  return gate * open * up;
}

template <class T>
struct Activate {
  Activation a;
  Matrix<T> h, y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    y[i][j] = T(activation_of<Wide<T>>(a, h[i][j]));
  }
};

// The same, and the bias on the way: h keeps it.
template <class T>
struct ActivateBiased {
  Activation a;
  Matrix<T> h;
  const T* bias;
  Matrix<T> y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    h[i][j] = T(h[i][j] + bias[j]);
    y[i][j] = T(activation_of<Wide<T>>(a, h[i][j]));
  }
};

template <class T>
struct ActivateBackward {
  Activation a;
  Matrix<T> h, dy;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    using F = Wide<T>;
    dy[i][j] = T(dy[i][j] * activation_slope<F>(a, h[i][j]));
    h[i][j] = T(activation_of<F>(a, h[i][j]));
  }
};

// xielu with its two numbers.
template <class F>
struct XieluOf {
  F above, below;
  template <class T>
  ECHELON_HOST_DEVICE explicit XieluOf(const T* alphas)
      : above(softplus(F(alphas[0]))), below(F(Xielu::beta) + softplus(F(alphas[1]))) {}
  ECHELON_HOST_DEVICE static F softplus(F x) {
    return (x > F(0) ? x : F(0)) + std::log1p(std::exp(x > F(0) ? -x : x));
  }
  // What `above` and `below` are multiplied by: one of them, the other is 0.
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
  Activation a;
  SwigluClamp clamp;
  Matrix<T> gate_up, y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    y[i][j] = T(gated_of<Wide<T>>(a, gate_up[i][j], gate_up[i][y.cols + j], clamp));
  }
};

template <class T>
struct GatedBackward {
  Activation a;
  SwigluClamp clamp;
  Matrix<T> gate_up, dy;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    using F = Wide<T>;
    const F y = gated_gradient(a, gate_up[i][j], gate_up[i][dy.cols + j], F(dy[i][j]), clamp);
    dy[i][j] = T(y);
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
  Activation a;
  SwigluClamp clamp;
  Matrix<T> hidden, dy;
  const Wide<T>* weights;
  Wide<T>* dweights;
  ECHELON_HOST_DEVICE Wide<T> gradient(T* row, std::int64_t j, Wide<T> d) const {
    if (is_gated(a)) return gated_gradient(a, row[j], row[dy.cols + j], d, clamp);
    const Wide<T> h = row[j];
    row[j] = T(d * activation_slope<Wide<T>>(a, h));
    return activation_of<Wide<T>>(a, h);
  }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    F sum = 0;
    for (std::int64_t j = team.lane(); j < dy.cols; j += team.lanes()) {
      const F d = dy[i][j];
      const F y = gradient(hidden[i], j, d * weights[i]);
      sum += d * y;
      dy[i][j] = T(y * weights[i]);
    }
    sum = sum_of(team, sum);
    if (team.lane() == 0) dweights[i] = sum;
  }
};

}  // namespace echelon::rows
