// The activation function between the two matrix products of an MLP.
#pragma once

#include "spec/choices.h"

namespace echelon {

// gelu: GELU in its tanh form (Hendrycks 2016; GPT-2's gelu_new). gelu_erf: exact GELU, h Phi(h), which the
// tanh form approximates. swiglu and geglu (Shazeer 2020): the input is [gate | up], the output silu(gate) *
// up and gelu(gate) * up. relu: max(h, 0). relu2: its square (Primer, So et al. 2021). clamped_swiglu: see
// SwigluClamp. xielu: see Xielu.
enum class Activation { gelu, swiglu, geglu, relu2, gelu_erf, clamped_swiglu, xielu, relu };
template <>
inline constexpr std::array choice_names<Activation>{"gelu",     "swiglu",         "geglu", "relu2",
                                                     "gelu_erf", "clamped_swiglu", "xielu", "relu"};

// Whether the input is [gate | up], twice as wide as the output.
constexpr bool is_gated(Activation a) {
  return a == Activation::swiglu || a == Activation::geglu || a == Activation::clamped_swiglu;
}

// xIELU (Huang & Schlag 2024, https://arxiv.org/abs/2411.13010): a h^2 + beta h where h > 0, and b
// (exp(min(h, largest)) - 1 - h) + beta h elsewhere. Each layer learns a = softplus(alpha_p) and b = beta +
// softplus(alpha_n); both a and b start at 0.8 (`begin`).
struct Xielu {
  static constexpr double beta = 0.5, largest = -1e-6, begin = 0.8;
};

// The constants of clamped_swiglu (gpt-oss, https://arxiv.org/abs/2508.10925). Of [gate | up] it computes g
// sigmoid(alpha g) (u + 1), where g = min(gate, limit) and u is up clamped to [-limit, limit]. A clamped
// element has no gradient.
struct SwigluClamp {
  double alpha = 1.702, limit = 7;
  bool operator==(const SwigluClamp&) const = default;
};

}  // namespace echelon
