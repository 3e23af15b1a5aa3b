// fp8 (base/fp8.h): what multiplies the layers of a run in it. Weights, activations and their gradients are
// kept as in bf16; the products of layers round their operands to fp8 first and sum in f32. Which products:
// those of a block's matrices, of queries, keys and values, of the MLP, of experts. Embeddings, the output
// layer, routers, attention's core and adapters stay in bf16.
#pragma once

#include "base/fp8.h"
#include "spec/precision.h"

namespace echelon {

inline constexpr const char* fp8_name = "fp8";

inline bool multiplies_in_fp8(const PrecisionRecipe& precision) { return precision.name == fp8_name; }

// What a rounded number may be off by, of its size.
constexpr double fp8_epsilon(Fp8 format) { return format == Fp8::e4m3 ? 0x1p-4 : 0x1p-3; }
// Two scales are powers of two, and differ in numbers below the smallest normal one alone: those are off by
// half of 2^-9 (e4m3) where the largest is above 224, in each of two runs, and in e5m2 by less.
inline constexpr double fp8_scale_error = 0x1p-16;

// What both operands of a product are rounded to.
struct OperandFormats {
  bool in_fp8 = false;  // or they stay as they are
  Fp8 a = Fp8::e4m3, b = Fp8::e4m3;
};

// Of the products of layers under a recipe: weights and activations in e4m3, gradients of outputs, which
// spread over more orders of magnitude, in e5m2 (section 3.1 of Micikevicius et al. 2022).
class LayerFormats {
 public:
  explicit LayerFormats(const PrecisionRecipe& precision) : in_fp8_(multiplies_in_fp8(precision)) {}
  OperandFormats forward() const { return {in_fp8_, Fp8::e4m3, Fp8::e4m3}; }
  // dy times a weight.
  OperandFormats of_input() const { return {in_fp8_, Fp8::e5m2, Fp8::e4m3}; }
  // dy^T x, or x^T dy.
  OperandFormats of_weight(bool x_first = false) const {
    return x_first ? OperandFormats{in_fp8_, Fp8::e4m3, Fp8::e5m2}
                   : OperandFormats{in_fp8_, Fp8::e5m2, Fp8::e4m3};
  }

 private:
  bool in_fp8_;
};

}  // namespace echelon
