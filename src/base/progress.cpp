#include "base/progress.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/units.h"

namespace echelon {

bool ProgressPace::is_due(double seconds) {
  if (seconds < next_) return false;
  next_ = terminal_ ? seconds + 0.25 : 2 * seconds;
  return true;
}

std::string progress_text(const std::string& verb, const std::string& what, double done, double seconds,
                          int columns) {
  std::string text = verb + ":";
  if (!what.empty()) text += fmt::format(" {},", what);
  if (done >= 0) text += fmt::format(" {:.0f}%,", 100 * std::min(1.0, done));
  text += " " + format_whole_seconds(seconds);
  if (text.size() > static_cast<std::size_t>(std::max(0, columns)))
    text.resize(static_cast<std::size_t>(std::max(0, columns)));
  return text;
}

}  // namespace echelon
