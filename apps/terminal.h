// The terminal that the program writes to.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

namespace echelon {

bool is_terminal(std::FILE* stream);
// The terminal's width, or the environment's COLUMNS; `otherwise` if neither is known.
int terminal_columns(std::FILE* stream, int otherwise);
// The width of lines on `stream`: a terminal's; elsewhere, and for nullptr, unlimited.
int line_columns(std::FILE* stream);
// Breaks longer lines at spaces; continuation lines are indented further.
std::string fitted(const std::string& text, int columns);
// Prints what people read beside a run. A run goes on where that cannot be written, as on a full disk:
// fmt::print() would throw; std::ferror() says so later.
template <class... Values>
void show(std::FILE* stream, fmt::format_string<Values...> form, Values&&... values) {
  const std::string text = fmt::format(form, std::forward<Values>(values)...);
  (void)std::fwrite(text.data(), 1, text.size(), stream);
}
// Moves to the line's beginning and clears the line, to overwrite it.
inline constexpr const char* fresh_line = "\r\033[K";

}  // namespace echelon
