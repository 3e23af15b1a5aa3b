#include "apps/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

namespace echelon {

bool is_terminal(std::FILE* stream) { return ::isatty(::fileno(stream)) == 1; }

int terminal_columns(std::FILE* stream, int otherwise) {
  winsize size{};
  if (::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col >= 20) return size.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const int given = columns == nullptr ? 0 : std::atoi(columns);
  return given >= 20 && given <= 100000 ? given : otherwise;
}

}  // namespace echelon
