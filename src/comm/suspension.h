// Detects that a job was suspended as a whole and resumed (Ctrl-Z and fg, a scheduler, a paused virtual
// machine). No rank is at fault then: waits were long only because the clock went on.
#pragma once

#include "base/clock.h"

namespace echelon {

class Suspension {
 public:
  // Call it several times a second, with a clock that continues during suspension. True for a whole `timeout`
  // after a gap between calls: waits then start anew.
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
