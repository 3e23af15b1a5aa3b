// What the program knows of the terminal that it writes to.
#pragma once

#include <cstdio>

namespace echelon {

bool is_terminal(std::FILE* stream);
// The terminal's width, or COLUMNS of the environment; `otherwise` where neither tells.
int terminal_columns(std::FILE* stream, int otherwise);
// To the line's beginning, and what is on it gone: for a line that is written over.
inline constexpr const char* fresh_line = "\r\033[K";

}  // namespace echelon
