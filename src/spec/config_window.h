// Reads sliding windows from config.json, and which layers have them.
#pragma once

#include <vector>

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// The WindowSpec that gives these layers (true: has a window) a window of `size`: with a period if there is
// one.
WindowSpec window_of(const std::vector<bool>& in, std::int64_t size);

// A model's window as a list of its layers would give it: of few layers, a rule may leave out none, or all. A
// window as long as the longest trained sequence is none, unless layers with it have positions of their own.
WindowSpec plain_window(const ModelSpec& m);

// Which layers have a window: by layer_types if given, or all. If transformers ignores these keys for the
// type (not `typed`), they may only repeat what holds anyway. A window as long as the longest trained
// sequence is left out of the model, but returned all the same.
WindowSpec read_window(const Config& config, bool in_all, bool typed, ModelSpec& m);

// By default, windows in all layers but each fourth, and rotary positions only in the layers with a window.
void read_turned_windows(const Config& config, ModelSpec& m, const char* interval = "sliding_window_pattern");

}  // namespace echelon
