// How long tests wait for what must come.
#pragma once

#include <chrono>
#include <thread>

namespace echelon::checks {

// Longer than anything takes on any machine: what waits so long hangs, and is to say where.
inline constexpr std::chrono::minutes patience{5};

// Returns when it is so, however long that takes: a test that hangs is ended from outside.
template <class So>
void wait_until(const So& so) {
  while (!so()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace echelon::checks
