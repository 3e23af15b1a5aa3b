// What stands between the two products of an MLP.
#pragma once

#include "spec/choices.h"

namespace echelon {

// gelu: tanh form (Hendrycks 2016; GPT-2's gelu_new); gelu_erf: h times the normal distribution function of
// h, which that comes near to. swiglu (Shazeer 2020): of [gate | up], silu(gate) up. geglu (the same):
// gelu(gate) up. relu2: max(h, 0)^2 (Primer, So et al. 2021).
enum class Activation { gelu, swiglu, geglu, relu2, gelu_erf };
template <>
inline constexpr std::array choice_names<Activation>{"gelu", "swiglu", "geglu", "relu2", "gelu_erf"};

// Whether it makes one number of two.
constexpr bool is_gated(Activation a) { return a == Activation::swiglu || a == Activation::geglu; }

}  // namespace echelon
