#include "apps/stop_signals.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "apps/terminal.h"
#include "base/clock.h"
#include "base/start_thread.h"

namespace echelon {

sigset_t stop_signals() {
  sigset_t signals{};
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&signals, signal);
  return signals;
}

namespace {

// Includes SIGHUP, unless nohup made the process ignore it: blocked signals are never ignored.
sigset_t signals_of_a_run() {
  sigset_t signals = stop_signals();
  struct sigaction hang_up {};
  if (::sigaction(SIGHUP, nullptr, &hang_up) == 0 && hang_up.sa_handler != SIG_IGN)
    sigaddset(&signals, SIGHUP);
  return signals;
}

// The terminal is gone: writing to it would fail, and the run with it.
void leave_terminal() {
  const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO})
    if (nowhere >= 0 && (::isatty(fd) == 1 || errno == EIO)) ::dup2(nowhere, fd);
  if (nowhere >= 0) ::close(nowhere);
}

}  // namespace

StopSignals::StopSignals() : signals_(signals_of_a_run()) {
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  thread_ = start_thread("signals", [this] { take(); });
}

StopSignals::~StopSignals() {
  ending_ = true;
  pthread_kill(thread_.native_handle(), SIGUSR1);
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  if (!readers_.empty()) ::signal(SIGPIPE, SIG_DFL);
}

void StopSignals::listen(std::string notice) {
  notice_ = std::move(notice);
  listens_ = true;
}

void StopSignals::listen_to_reader(std::FILE* stream) {
  const int fd = ::fileno(stream);
  struct stat out {};
  if (::fstat(fd, &out) != 0 || !(S_ISFIFO(out.st_mode) || S_ISSOCK(out.st_mode))) return;
  struct sigaction pipe {};
  if (readers_.empty() && (::sigaction(SIGPIPE, nullptr, &pipe) != 0 || pipe.sa_handler != SIG_DFL)) return;
  ::signal(SIGPIPE, SIG_IGN);
  readers_.push_back(fd);
}

bool StopSignals::reader_is_gone() const {
  return std::any_of(readers_.begin(), readers_.end(), [](int fd) {
    pollfd out{fd, 0, 0};
    return ::poll(&out, 1, 0) > 0 && (out.revents & (POLLERR | POLLHUP)) != 0;
  });
}

void StopSignals::take() {
  for (Clock::time_point first;;) {
    int signal = 0;
    sigwait(&signals_, &signal);
    if (ending_) return;
    if (signal == SIGHUP) leave_terminal();
    if (listens_ && !asked_.exchange(true)) {
      first = Clock::now();
      if (!notice_.empty())  // replaces a progress line, and the terminal's ^C
        show(stderr, "{}{}\n", is_terminal(stderr) ? fresh_line : "", notice_);
    }
    if (asked_ && Clock::now() - first < one_stop_request) continue;
    ::kill(::getpid(), signal);
    pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);  // here it ends the process
  }
}

}  // namespace echelon
