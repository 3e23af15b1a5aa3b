// Where and how simulate's drawings are shown.
#pragma once

#include <string>

#include "apps/simulate_flags.h"
#include "draw/gantt.h"

namespace echelon {

// The columns of the terminal, and whether it has colours.
TextOptions text_options(const SimulateFlags& flags);
// RequestError for a --width or --colour that is none.
void check_text_options(const SimulateFlags& flags);

// To --out, or standard output. RequestError where the file cannot be made.
void write_drawing(const SimulateFlags& flags, const std::string& text);

}  // namespace echelon
