// Progress of long work: the work reports it, and the caller decides what to show.
#pragma once

#include <functional>
#include <string>

namespace echelon {

// `done` is the finished fraction, from 0 to 1, or negative if unknown; `what` comes next. Called before each
// piece, from one thread at a time. May be empty.
using Progress = std::function<void(double done, const std::string& what)>;

inline void report(const Progress& progress, double done, const std::string& what) {
  if (progress) progress(done, what);
}

// Decides when a progress line is due. On a terminal the line is overwritten, so it appears after a second
// and stays current; elsewhere each line stays, so they become less and less frequent.
class ProgressPace {
 public:
  explicit ProgressPace(bool terminal) : terminal_(terminal), next_(terminal ? 1 : 30) {}
  double next_seconds() const { return next_; }
  // Whether a line is due `seconds` after the start; if so, schedules the next one later.
  bool is_due(double seconds);

 private:
  bool terminal_;
  double next_;
};

// "verify: step 2 of 3, 33%, 12s", at most `columns` long.
std::string progress_text(const std::string& verb, const std::string& what, double done, double seconds,
                          int columns);

}  // namespace echelon
