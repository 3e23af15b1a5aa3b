// The clock that everything measured is measured by.
#pragma once

#include <chrono>

namespace echelon {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace echelon
