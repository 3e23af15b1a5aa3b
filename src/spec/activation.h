// What stands between the two products of an MLP.
#pragma once

#include "spec/choices.h"

namespace echelon {

// gelu: tanh form (Hendrycks 2016; GPT-2's gelu_new); gelu_erf: h times the normal distribution function of
// h, which that comes near to. swiglu (Shazeer 2020): of [gate | up], silu(gate) up. geglu (the same):
// gelu(gate) up. relu: max(h, 0), and relu2 its square (Primer, So et al. 2021). clamped_swiglu: see
// SwigluClamp. xielu: see Xielu.
enum class Activation { gelu, swiglu, geglu, relu2, gelu_erf, clamped_swiglu, xielu, relu };
template <>
inline constexpr std::array choice_names<Activation>{"gelu",     "swiglu",         "geglu", "relu2",
                                                     "gelu_erf", "clamped_swiglu", "xielu", "relu"};

// Whether it makes one number of two.
constexpr bool is_gated(Activation a) {
  return a == Activation::swiglu || a == Activation::geglu || a == Activation::clamped_swiglu;
}

// xielu (Huang & Schlag 2024, https://arxiv.org/abs/2411.13010): a h^2 + beta h above 0, and below
// b (exp(min(h, largest)) - 1 - h) + beta h. Each layer learns a = softplus(alpha_p) and
// b = beta + softplus(alpha_n), which begin at 0.8.
struct Xielu {
  static constexpr double beta = 0.5, largest = -1e-6, begin = 0.8;
};

// Of clamped_swiglu (gpt-oss, https://arxiv.org/abs/2508.10925): of [gate | up] it makes
// g sigmoid(alpha g) (u + 1), where g is min(gate, limit) and u is up brought between -limit and limit.
// What is brought to a limit has no gradient.
struct SwigluClamp {
  double alpha = 1.702, limit = 7;
  bool operator==(const SwigluClamp&) const = default;
};

}  // namespace echelon
