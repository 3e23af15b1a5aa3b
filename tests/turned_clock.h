// Clocks that the test turns.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "comm/threads.h"
#include "patience.h"

namespace echelon::checks {

// One for all threads. It stands still but for turn().
class TurnedClock {
 public:
  Time time() {
    return {[this] { return Clock::time_point(Clock::duration(now_.load())); },
            [this](Clock::duration d) { turn(d); }};
  }
  void turn(Clock::duration d) { now_ += d.count(); }

 private:
  std::atomic<Clock::rep> now_{0};
};

// A clock for each thread, and so for each rank of a job, from 0 on. It goes on when the rank sleeps, and by
// `look` whenever it is looked at: what a rank does takes as long as it has looks in it, on any machine.
inline Time time_of_each_thread(Clock::duration look = {}) {
  static thread_local Clock::time_point here;
  return {[look] { return here += look; }, [](Clock::duration d) { here += d; }};
}
inline void sleep_until(const Time& time, Clock::time_point there) {
  if (const auto left = there - time.now(); left.count() > 0) time.sleep(left);
}

// A job whose waits may last `timeout` on the clock of `time`, and what a thread that is no rank's does
// beside it.
struct TimedJob {
  std::chrono::milliseconds timeout = patience;
  Time time{};
  std::function<void(ThreadWorld&)> beside{};
  FailureHooks hooks{};
};

class Beside {
 public:
  Beside(const TimedJob& job, ThreadWorld& world) {
    if (job.beside) thread_ = std::thread([&] { job.beside(world); });
  }
  ~Beside() {
    if (thread_.joinable()) thread_.join();
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

 private:
  std::thread thread_;
};

}  // namespace echelon::checks
