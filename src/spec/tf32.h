// TF32, the tensor cores' format for f32 operands. Products round their operands to 10 fraction bits,
// multiply exactly and sum in f32. All else stays f32.
#pragma once

#include "spec/precision.h"

namespace echelon {

inline constexpr const char* tf32_name = "tf32";

// Whether f32 products use TF32.
inline bool multiplies_in_tf32(const PrecisionRecipe& precision) { return precision.name == tf32_name; }

// The relative error of an operand. It allows for truncation, since devices do not say how they round.
inline constexpr double tf32_epsilon = 0x1p-10;

}  // namespace echelon
