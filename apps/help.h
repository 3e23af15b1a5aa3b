// The form of --help: the flags that most runs need first, the others under headings, in lines that fit a
// terminal.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>

namespace echelon {

inline constexpr const char* common_flags = "Common flags";

// Flags that are added from now on appear under this heading.
inline void heading(CLI::App& app, const char* name) { app.option_defaults()->group(name); }

// For the program and its verbs, after all are added.
void arrange_help(CLI::App& program);

// The width of help on standard output: a terminal's, up to 100; otherwise 80.
int help_columns();
// The text's words in lines from column `begin` to `columns`; the first line is already at `begin`.
std::string in_lines(const std::string& text, std::size_t begin, int columns);
// The help text of a flag.
std::string help_of(const CLI::Option& flag);
// A name in the left column, and its description in the right one.
std::string help_line(const std::string& name, const std::string& text, int columns);

}  // namespace echelon
