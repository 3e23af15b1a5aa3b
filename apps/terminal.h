// The terminal that the program writes to.
#pragma once

#include <cstdio>
#include <string>

namespace echelon {

bool is_terminal(std::FILE* stream);
// The terminal's width, or the environment's COLUMNS; `otherwise` if neither is known.
int terminal_columns(std::FILE* stream, int otherwise);
// The width of lines on `stream`: a terminal's; elsewhere, and for nullptr, unlimited.
int line_columns(std::FILE* stream);
// Breaks longer lines at spaces; continuation lines are indented further.
std::string fitted(const std::string& text, int columns);
// Moves to the line's beginning and clears the line, to overwrite it.
inline constexpr const char* fresh_line = "\r\033[K";

}  // namespace echelon
