// Runs commands one after another for `launch`: hands on to them what asks this process to stop, and ends
// them by force, with all that they started, when they do not end by themselves.
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
  // How long is waited for what. Three seconds before `grace` has passed since a request to stop, whatever
  // runs is ended by force.
  struct Patience {
    std::chrono::milliseconds grace{10'000};
    std::chrono::milliseconds silence{60'000};  // of all ranks that mpirun has started
  };
  // The clock of `time` is the one that patience is measured by.
  explicit Commands(const Patience& patience, const Time& time = {});
  ~Commands();
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  bool asked_to_stop() const { return asked_at_.has_value(); }

  struct Ended {
    int status = 0;           // its own, or 128 + the signal that ended it
    std::optional<int> said;  // what the training said of itself
    bool lasting = false;     // it said that the same would come again
    std::string forced;       // why it was ended by force; empty: it ended by itself
  };
  // Of a training, which says how it ends (launch_words.h).
  Ended train(const std::vector<std::string>& words);
  // Of any other command: its status.
  int run(const std::vector<std::string>& words);

  // Sleeps, but no longer than until a request to stop.
  void sleep(std::chrono::milliseconds time);

 private:
  struct Child;
  void wait(Child& child);
  void take_signals(Child& child);
  // Whether a command must be ended by force now, and why.
  std::string overdue(const Child& child) const;

  Patience patience_;
  Time time_;
  sigset_t signals_, before_{};
  int signal_fd_ = -1;
  std::optional<Clock::time_point> asked_at_;
};

}  // namespace echelon
