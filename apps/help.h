// How --help looks: the flags that most runs use first, the others under headings, lines that fit a terminal.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>

namespace echelon {

inline constexpr const char* common_flags = "Common flags";

// Flags that are added from now on stand under this heading.
inline void heading(CLI::App& app, const char* name) { app.option_defaults()->group(name); }

// For the program and its verbs, once all are added.
void arrange_help(CLI::App& program);

// Columns of help on standard output: those of a terminal, up to 100; elsewhere 80.
int help_columns();
// The text's words in lines that start at column `begin` and end by `columns`; the first line is there
// already.
std::string in_lines(const std::string& text, std::size_t begin, int columns);
// What --help says of a flag.
std::string help_of(const CLI::Option& flag);
// A name in the left column, what is said of it in the right one.
std::string help_line(const std::string& name, const std::string& text, int columns);

}  // namespace echelon
