// What config.json says of windows, and of the layers that have them.
#pragma once

#include <optional>
#include <vector>

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// The window of so many layers, of those that are in it; none where no rule of WindowSpec says which.
std::optional<WindowSpec> window_of(const std::vector<bool>& in, std::int64_t size);

// A model's window as a list of its layers would say it: of so few layers a rule may leave out none, or all;
// and one that no sequence fills is none, unless layers that have it have positions of their own.
WindowSpec plain_window(const ModelSpec& m);

// Layers with a window, by layer_types where they are named: all, or all but each n-th, or but the first of
// each n. Where transformers does not heed them (not `typed`) they may only say what is so anyway. A window
// that no trained sequence fills is none; returns it all the same.
WindowSpec read_window(const Config& config, bool in_all, bool typed, ModelSpec& m);

// A window in all layers but each fourth, by default, and positions in these alone.
void read_turned_windows(const Config& config, ModelSpec& m, std::int64_t otherwise = 4096,
                         const char* interval = "sliding_window_pattern");

}  // namespace echelon
