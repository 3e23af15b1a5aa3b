#include "apps/stop_signals.h"

#include <unistd.h>

#include "base/clock.h"
#include "base/start_thread.h"

namespace echelon {

sigset_t stop_signals() {
  sigset_t signals{};
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&signals, signal);
  return signals;
}

StopSignals::StopSignals() {
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  thread_ = start_thread("signals", [this] { take(); });
}

StopSignals::~StopSignals() {
  ending_ = true;
  pthread_kill(thread_.native_handle(), SIGUSR1);
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopSignals::take() {
  for (Clock::time_point first;;) {
    int signal = 0;
    sigwait(&signals_, &signal);
    if (ending_) return;
    if (listens_ && !asked_.exchange(true)) first = Clock::now();
    if (asked_ && Clock::now() - first < one_stop_request) continue;
    ::kill(::getpid(), signal);
    pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);  // here it ends the process
  }
}

}  // namespace echelon
