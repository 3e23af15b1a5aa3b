// One line on standard error that says how far a verb is: on a terminal from the first second on, written
// over and gone at the end; elsewhere a line after 30 seconds, 60, 120 and so on.
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
  // With `terminal_only`, as for --json, whose output programs read, nothing elsewhere.
  ProgressLine(std::string verb, bool terminal_only);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // What work reports to; valid as long as this is.
  Progress progress();
  // Takes the line away until the next report, so that something else can be printed.
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

// What `work`, which is handed where to report to, returns; the line is gone then.
template <class Work>
auto with_progress(const char* verb, bool terminal_only, const Work& work) {
  ProgressLine line(verb, terminal_only);
  return work(line.progress());
}

}  // namespace echelon
