// A job that is stopped as a whole and goes on (Ctrl-Z and fg, a scheduler, a virtual machine that is paused) has no
// rank at fault: its waits lasted because the clock went on.
#pragma once

#include "base/clock.h"

namespace echelon {

class Suspension {
 public:
  // Asked several times a second, with the clock that goes on meanwhile. True for a whole `timeout` behind a
  // time in which nobody asked: what is waited for then has to be waited for anew.
  bool forgives(Clock::time_point now, Clock::duration timeout) {
    constexpr std::chrono::seconds stopped{2};
    if (asked_ && now - last_ > stopped) until_ = now + timeout;
    asked_ = true;
    last_ = now;
    return now < until_;
  }

 private:
  bool asked_ = false;
  Clock::time_point last_{}, until_{};
};

}  // namespace echelon
