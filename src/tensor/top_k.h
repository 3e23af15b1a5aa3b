// The largest elements of a buffer. F is float or double.
#pragma once

#include <cstdint>

namespace echelon {

// Moves the k of the n elements at x that are largest in magnitude (NaN above infinity; of equal ones those
// with the lower index) to values, leaving zeros, and adds first_index to their indices. Indices ascend.
template <class F>
void take_largest(F* x, std::int64_t n, std::int64_t k, std::int64_t first_index, F* values,
                  std::int32_t* indices);

}  // namespace echelon
