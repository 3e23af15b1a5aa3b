#pragma once

#include "spec/choices.h"

namespace echelon {

// How sums are grouped. ordinary: in whatever way is fastest on the mesh. invariant: by logical indices only,
// so that every accepted mesh gives the same bits (docs/invariance.md).
enum class Numerics { ordinary, invariant };
template <>
inline constexpr std::array choice_names<Numerics>{"ordinary", "invariant"};

}  // namespace echelon
