// TF32: what a device's tensor cores make of f32. Operands of products lose all but 10 bits of their
// fractions; products are exact, sums f32. All else stays f32.
#pragma once

#include "spec/precision.h"

namespace echelon {

inline constexpr const char* tf32_name = "tf32";

// Whether products of f32 are multiplied so.
inline bool multiplies_in_tf32(const PrecisionRecipe& precision) { return precision.name == tf32_name; }

// What an operand may be off by, of its size: how devices round it, or whether they cut it off, is not said.
inline constexpr double tf32_epsilon = 0x1p-10;

}  // namespace echelon
