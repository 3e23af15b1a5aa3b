// SIGTERM, SIGINT, SIGHUP and SIGUSR1, which mpirun hands on without ending itself: the words by which a
// training is asked to end after its step.
//
// They are taken by a thread of their own, and blocked in every other: a handler would run on whichever
// thread computes, and its frame lie where that thread's stack pointer says. Inside oneDNN's f32 products
// that is the heap (uxlfoundation/oneDNN issue 4845, in all versions until 2026).
#pragma once

#include <signal.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace echelon {

// Signals within this time of the first are the same request: timeout(1) signals its command and then the
// group that the command is in, a service manager all processes that one started.
inline constexpr std::chrono::seconds one_stop_request{1};

// SIGTERM, SIGINT and SIGUSR1.
sigset_t stop_signals();

// Made before any thread that it is to protect.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // From now on the first signal asks, with those of the same request; before, and later ones, end the
  // process as by default. `notice` is said on standard error then.
  void listen(std::string notice = {});
  bool asked() const { return asked_; }

 private:
  void take();

  const sigset_t signals_;
  sigset_t before_{};
  std::string notice_;  // set before listens_
  std::atomic<bool> listens_{false}, asked_{false}, ending_{false};
  std::thread thread_;
};

}  // namespace echelon
