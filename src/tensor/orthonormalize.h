// Orthonormal rows. F is float or double.
#pragma once

#include <cstdint>

#include "base/philox.h"

namespace echelon {

// Makes the rows of x (rows, cols; rows <= cols) orthonormal in place, in their order, so that the first i
// rows span what they spanned before. A row that depends on those above it (zero, or equal to a combination
// of them up to rounding) has no direction of its own and is drawn from `fresh`: two runs get the same one. A
// value that is not finite makes its row, and those below, NaN. The same bits for the same input.
template <class F>
void orthonormalize_rows(F* x, std::int64_t rows, std::int64_t cols, const Philox& fresh);

}  // namespace echelon
