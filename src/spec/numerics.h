#pragma once

#include "spec/choices.h"

namespace echelon {

// How sums are grouped: in whatever way is fastest on the mesh, or by logical indices alone, so that every
// mesh that is not refused has the same bits (docs/invariance.md).
enum class Numerics { ordinary, invariant };
template <>
inline constexpr std::array choice_names<Numerics>{"ordinary", "invariant"};

}  // namespace echelon
