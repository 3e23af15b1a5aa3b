// One line on standard error that shows a verb's progress: on a terminal from the first second on,
// overwritten, and removed at the end; elsewhere a line after 30 seconds, 60, 120 and so on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "base/progress.h"

namespace echelon {

class ProgressLine {
 public:
  // `terminal_only`: prints nothing elsewhere, as with --json, whose output programs read.
  ProgressLine(std::string verb, bool terminal_only);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // Where work reports its progress; valid as long as this exists.
  Progress progress();
  // Removes the line until the next report, so that something else can be printed.
  void clear();

 private:
  void keep_fresh();
  void erase();

  const std::string verb_;
  const bool terminal_, quiet_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable changed_;
  ProgressPace pace_;
  std::string what_;
  double done_ = -1;
  bool reported_ = false, shown_ = false, ending_ = false;
  std::thread thread_;
};

// Returns the result of `work`, which is passed where to report; removes the line then.
template <class Work>
auto with_progress(const char* verb, bool terminal_only, const Work& work) {
  ProgressLine line(verb, terminal_only);
  return work(line.progress());
}

}  // namespace echelon
