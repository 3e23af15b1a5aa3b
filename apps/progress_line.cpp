#include "apps/progress_line.h"

#include <fmt/core.h>

#include "apps/launched.h"
#include "apps/terminal.h"
#include "apps/verbs.h"
#include "base/clock.h"
#include "base/start_thread.h"

namespace echelon {

ProgressLine::ProgressLine(std::string verb, bool terminal_only)
    : verb_(std::move(verb)),
      terminal_(is_terminal(stderr)),
      quiet_(is_another_process() || (terminal_only && !terminal_)),
      pace_(terminal_) {
  if (!quiet_) thread_ = start_thread("the progress line", [this] { keep_fresh(); });
}

ProgressLine::~ProgressLine() {
  if (quiet_) return;
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  erase();
}

Progress ProgressLine::progress() {
  if (quiet_) return {};
  return [this](double done, const std::string& what) {
    const std::lock_guard lock(mutex_);
    done_ = done;
    what_ = what;
    reported_ = true;
  };
}

void ProgressLine::clear() {
  const std::lock_guard lock(mutex_);
  erase();
  reported_ = false;
}

void ProgressLine::erase() {
  if (shown_ && terminal_) show(stderr, "{}", fresh_line);
  std::fflush(stderr);
  shown_ = false;
}

// In a separate thread, since a piece of the work may take long.
void ProgressLine::keep_fresh() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    changed_.wait_until(lock, begin_ + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(pace_.next_seconds())));
    if (ending_ || !pace_.is_due(seconds_since(begin_)) || !reported_) continue;
    const int columns = terminal_ ? terminal_columns(stderr, 80) - 1 : 79;
    const std::string text = progress_text(verb_, what_, done_, seconds_since(begin_), columns);
    show(stderr, "{}{}{}", terminal_ ? fresh_line : "", text, terminal_ ? "" : "\n");
    std::fflush(stderr);
    shown_ = true;
  }
}

}  // namespace echelon
