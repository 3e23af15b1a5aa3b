// Runs commands one after another for `launch`. Forwards requests to stop, and kills commands that do not end
// by themselves, with all that they started.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace echelon {

class Commands {
 public:
  // How long to wait for what. A command that still runs three seconds before the end of `grace`, counted
  // from a request to stop, is killed.
  struct Patience {
    std::chrono::milliseconds grace{10'000};
    std::chrono::milliseconds silence{60'000};  // of all ranks that mpirun has started
  };
  // Patience is measured by the clock of `time`.
  explicit Commands(const Patience& patience, const Time& time = {});
  ~Commands();
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  bool asked_to_stop() const { return asked_at_.has_value(); }

  struct Ended {
    int status = 0;           // its exit status, or 128 + the signal that ended it
    std::optional<int> said;  // what the training reported of itself
    bool lasting = false;     // it reported that the same failure would come again
    bool began = false;       // it reported anything
    std::string forced;       // why it was killed; empty: it ended by itself
  };
  // For a training, which reports how it ends (launch_words.h).
  Ended train(const std::vector<std::string>& words);
  // For any other command: returns its status.
  int run(const std::vector<std::string>& words);

  // Sleeps, at most until a request to stop.
  void sleep(std::chrono::milliseconds time);

 private:
  struct Child;
  void wait(Child& child);
  void take_signals(Child& child);
  // Whether a command must be killed now, and why.
  std::string overdue(const Child& child) const;

  Patience patience_;
  Time time_;
  sigset_t signals_, before_{};
  int signal_fd_ = -1;
  std::optional<Clock::time_point> asked_at_;
};

}  // namespace echelon
