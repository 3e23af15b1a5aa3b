// The clock for all measurements, and the clock that a job of ranks is given.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace echelon {

using Clock = std::chrono::steady_clock;

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}
inline double seconds_since(Clock::time_point begin) { return seconds_between(begin, Clock::now()); }

// How a job reads the time and sleeps. Everything that depends on time (long waits, silent ranks, how long a
// rank worked) uses this, so that tests can control the clock. Called by any thread.
struct Time {
  std::function<Clock::time_point()> now = [] { return Clock::now(); };
  std::function<void(Clock::duration)> sleep = [](Clock::duration d) { std::this_thread::sleep_for(d); };
};

}  // namespace echelon
