// Selects the largest elements of a buffer. F is float or double.
#pragma once

#include <cstdint>

namespace echelon {

// Moves the k elements with the largest magnitudes of the n at x (NaN above infinity; the lower index wins
// ties) to values, leaving zeros, and their indices plus first_index to indices, ascending.
template <class F>
void take_largest(F* x, std::int64_t n, std::int64_t k, std::int64_t first_index, F* values,
                  std::int32_t* indices);

}  // namespace echelon
