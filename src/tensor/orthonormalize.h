// Orthonormal rows. F is float or double.
#pragma once

#include <cstdint>

#include "base/philox.h"

namespace echelon {

// Orthonormalizes the rows of x (rows, cols; rows <= cols) in place and in order, so that the first i rows
// keep their span. A row that depends on those above it (zero, or a combination of them up to rounding) is
// replaced by one drawn from `fresh`, the same in every run. A value that is not finite makes its row and
// those below NaN. Deterministic: the same input gives the same bits.
template <class F>
void orthonormalize_rows(F* x, std::int64_t rows, std::int64_t cols, const Philox& fresh);

}  // namespace echelon
