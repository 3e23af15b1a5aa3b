// Where and how simulate's drawings are shown.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "apps/simulate_flags.h"
#include "draw/gantt.h"

namespace echelon {

// The columns of the terminal, and whether it has colours.
TextOptions text_options(const SimulateFlags& flags);
// RequestError for a --width or --colour that is none.
void check_text_options(const SimulateFlags& flags);

// Makes --format that of --out's name where none is given. RequestError where it is none of `legal`, or the
// name says another one.
void read_format(SimulateFlags& flags, const std::vector<std::string>& legal);
// RequestError for a flag of the drawing that has no effect on it; `is_drawn`: whether there is one at all.
void refuse_idle_drawing(const SimulateFlags& flags, const CLI::App& app, bool is_drawn);

// To --out, or standard output. RequestError where the file cannot be made.
void write_drawing(const SimulateFlags& flags, const std::string& text);

}  // namespace echelon
