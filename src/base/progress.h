// How far long work has come: work reports it, and whoever asked for the work decides what is shown.
#pragma once

#include <functional>
#include <string>

namespace echelon {

// `done` is the fraction that is finished, from 0 to 1, or below 0 where nobody can tell; `what` comes now.
// Called before each piece, from one thread at a time. Empty: nobody looks.
using Progress = std::function<void(double done, const std::string& what)>;

inline void report(const Progress& progress, double done, const std::string& what) {
  if (progress) progress(done, what);
}

// When a line about progress is due. On a terminal it is written over, so it appears after a second and stays
// fresh; elsewhere each line stays, so they come ever less often.
class ProgressPace {
 public:
  explicit ProgressPace(bool terminal) : terminal_(terminal), next_(terminal ? 1 : 30) {}
  double next_seconds() const { return next_; }
  // Whether one is due `seconds` after the start; if so, the next one is due later.
  bool is_due(double seconds);

 private:
  bool terminal_;
  double next_;
};

// "verify: step 2 of 3, 33%, 12s", at most `columns` long.
std::string progress_text(const std::string& verb, const std::string& what, double done, double seconds,
                          int columns);

}  // namespace echelon
