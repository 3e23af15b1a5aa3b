// fp8 training (base/fp8.h). Weights, activations and their gradients are stored as in bf16; the matrix
// products of layers round their operands to fp8 and accumulate in f32. These are the products of attention's
// projections, the MLP, the experts and a block's other matrices. Embeddings, the output layer, routers,
// attention's core and adapters stay in bf16.
#pragma once

#include "base/fp8.h"
#include "spec/precision.h"

namespace echelon {

inline constexpr const char* fp8_name = "fp8";

inline bool multiplies_in_fp8(const PrecisionRecipe& precision) { return precision.name == fp8_name; }

// The largest relative error of rounding to this format.
constexpr double fp8_epsilon(Fp8 format) { return format == Fp8::e4m3 ? 0x1p-4 : 0x1p-3; }
// The error that two different scales may add. Scales are powers of two, so results differ only for numbers
// below the smallest normal one. In e4m3 these are off by half of 2^-9 where the largest is above 224, in
// each of two runs; in e5m2 by less.
inline constexpr double fp8_scale_error = 0x1p-16;

// The formats that the two operands of a product are rounded to.
struct OperandFormats {
  bool in_fp8 = false;  // false: operands stay as they are
  Fp8 a = Fp8::e4m3, b = Fp8::e4m3;
};

// The formats of a layer's products under a recipe: e4m3 for weights and activations, e5m2 for output
// gradients, which spread over more orders of magnitude (Micikevicius et al. 2022, section 3.1).
class LayerFormats {
 public:
  explicit LayerFormats(const PrecisionRecipe& precision) : in_fp8_(multiplies_in_fp8(precision)) {}
  OperandFormats forward() const { return {in_fp8_, Fp8::e4m3, Fp8::e4m3}; }
  // Gradient of the input: dy times a weight.
  OperandFormats of_input() const { return {in_fp8_, Fp8::e5m2, Fp8::e4m3}; }
  // Gradient of the weight: dy^T x, or x^T dy if x_first.
  OperandFormats of_weight(bool x_first = false) const {
    return x_first ? OperandFormats{in_fp8_, Fp8::e4m3, Fp8::e5m2}
                   : OperandFormats{in_fp8_, Fp8::e5m2, Fp8::e4m3};
  }

 private:
  bool in_fp8_;
};

}  // namespace echelon
