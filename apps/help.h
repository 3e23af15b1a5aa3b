// How --help looks: the flags that most runs use first, the others under headings, lines that fit a terminal.
#pragma once

#include <CLI/CLI.hpp>

namespace echelon {

inline constexpr const char* common_flags = "Common flags";

// Flags that are added from now on stand under this heading.
inline void heading(CLI::App& app, const char* name) { app.option_defaults()->group(name); }

// For the program and its verbs, once all are added.
void arrange_help(CLI::App& program);

}  // namespace echelon
