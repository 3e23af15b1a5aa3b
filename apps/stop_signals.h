// SIGTERM, SIGINT, SIGHUP, and SIGUSR1 (which mpirun forwards without ending itself): the signals that ask a
// training to end after its step.
//
// A separate thread receives them, and they are blocked in every other thread: a handler would run on any
// thread that computes, with its frame at that thread's stack pointer. Inside oneDNN's f32 products this
// points into the heap (uxlfoundation/oneDNN issue 4845, in all versions until 2026).
#pragma once

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

namespace echelon {

// Signals within this time of the first are the same request: timeout(1) signals its command and then the
// command's group, and a service manager signals all processes of a service.
inline constexpr std::chrono::seconds one_stop_request{1};

// SIGTERM, SIGINT and SIGUSR1.
sigset_t stop_signals();

// Construct before any thread that it must protect.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // From now on, the first signal, with others of the same request, only sets asked(); earlier and later
  // signals end the process as by default. `notice` is printed on standard error then.
  void listen(std::string notice = {});
  // From now on the end of whoever reads standard output, or standard error, through a pipe is such a request
  // too (as of `| head`, or of ssh without a terminal), where SIGPIPE would end the process; not where
  // SIGPIPE was ignored already.
  void listen_to_reader(std::FILE* stream);
  bool asked() const { return asked_ || reader_is_gone(); }

 private:
  void take();
  bool reader_is_gone() const;

  const sigset_t signals_;
  sigset_t before_{};
  std::vector<int> readers_;  // the descriptors that pipes are read from
  std::string notice_;  // set before listens_
  std::atomic<bool> listens_{false}, asked_{false}, ending_{false};
  std::thread thread_;
};

}  // namespace echelon
