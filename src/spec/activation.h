// What stands between the two products of an MLP.
#pragma once

#include "spec/choices.h"

namespace echelon {

// gelu: tanh form (Hendrycks 2016; GPT-2's gelu_new); gelu_erf: h times the normal distribution function of
// h, which that comes near to. swiglu (Shazeer 2020): of [gate | up], silu(gate) up. geglu (the same):
// gelu(gate) up. relu2: max(h, 0)^2 (Primer, So et al. 2021). clamped_swiglu: see SwigluClamp.
enum class Activation { gelu, swiglu, geglu, relu2, gelu_erf, clamped_swiglu };
template <>
inline constexpr std::array choice_names<Activation>{"gelu",  "swiglu",   "geglu",
                                                     "relu2", "gelu_erf", "clamped_swiglu"};

// Whether it makes one number of two.
constexpr bool is_gated(Activation a) {
  return a == Activation::swiglu || a == Activation::geglu || a == Activation::clamped_swiglu;
}

// Of clamped_swiglu (gpt-oss, https://arxiv.org/abs/2508.10925): of [gate | up] it makes
// g sigmoid(alpha g) (u + 1), where g is min(gate, limit) and u is up brought between -limit and limit.
// What is brought to a limit has no gradient.
struct SwigluClamp {
  double alpha = 1.702, limit = 7;
  bool operator==(const SwigluClamp&) const = default;
};

}  // namespace echelon
