// What `echelon help TOPIC` tells: the beginning of the topic's document, its flags in whatever verb has
// them, and the presets that belong to it.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace echelon {

// The verb, for the program's own help and its completions. What it tells is asked of help_on().
void add_help(CLI::App& program);

// Of a topic, or of a verb ("bench", "comm"), which gets its --help; of nothing: --help of the program and
// all topics. `columns`: the longest line. RequestError for words that are neither, with the one that was
// probably meant.
std::string help_on(const CLI::App& program, const std::vector<std::string>& words, int columns);

std::vector<std::string> topic_names();

}  // namespace echelon
