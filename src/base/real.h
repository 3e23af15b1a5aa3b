// A count as a double; exact below 2^53.
#pragma once

#include <cstdint>

namespace echelon {

inline double real(std::int64_t count) { return static_cast<double>(count); }

}  // namespace echelon
