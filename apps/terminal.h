// What the program knows of the terminal that it writes to.
#pragma once

#include <cstdio>
#include <string>

namespace echelon {

bool is_terminal(std::FILE* stream);
// The terminal's width, or COLUMNS of the environment; `otherwise` where neither tells.
int terminal_columns(std::FILE* stream, int otherwise);
// As many columns as a line of `stream` may have: a terminal's; elsewhere, and of nullptr, any.
int line_columns(std::FILE* stream);
// Lines that are longer are broken at spaces, and go on further to the right than they began.
std::string fitted(const std::string& text, int columns);
// To the line's beginning, and what is on it gone: for a line that is written over.
inline constexpr const char* fresh_line = "\r\033[K";

}  // namespace echelon
