#include "apps/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

namespace echelon {

bool is_terminal(std::FILE* stream) { return ::isatty(::fileno(stream)) == 1; }

int terminal_columns(std::FILE* stream, int otherwise) {
  winsize size{};
  if (::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col >= 20) return size.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const int given = columns == nullptr ? 0 : std::atoi(columns);
  return given >= 20 && given <= 100000 ? given : otherwise;
}

int line_columns(std::FILE* stream) {
  return stream != nullptr && is_terminal(stream) ? terminal_columns(stream, 80)
                                                  : std::numeric_limits<int>::max();
}

std::string fitted(const std::string& text, int columns) {
  const auto most = static_cast<std::size_t>(columns);
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    const std::size_t begin = std::min(line.find_first_not_of(' '), most / 2);
    while (line.size() > most) {
      const std::size_t space = line.rfind(' ', most);
      if (space == std::string::npos || space <= begin + 4) break;
      out += line.substr(0, line.find_last_not_of(' ', space) + 1) + "\n";
      line = std::string(begin + 4, ' ') + line.substr(space + 1);
    }
    out += line;
    if (end < text.size()) out += '\n';
    at = end + 1;
  }
  return out;
}

}  // namespace echelon
