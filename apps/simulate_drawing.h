// Where and how simulate's drawings are shown.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "apps/simulate_flags.h"
#include "draw/gantt.h"

namespace echelon {

// The terminal's width, and whether it has colours.
TextOptions text_options(const SimulateFlags& flags);
// RequestError for an illegal --width or --colour.
void check_text_options(const SimulateFlags& flags);

// Sets --format by --out's name if it is not given. RequestError if it is not in `legal`, or contradicts the
// name.
void read_format(SimulateFlags& flags, const std::vector<std::string>& legal);
// RequestError for a drawing flag without effect; `is_drawn`: whether there is a drawing at all.
void refuse_idle_drawing(const SimulateFlags& flags, const CLI::App& app, bool is_drawn);

// Writes to --out, or to standard output. RequestError if the file cannot be created.
void write_drawing(const SimulateFlags& flags, const std::string& text);

}  // namespace echelon
