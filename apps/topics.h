// The output of `echelon help TOPIC`: the beginning of the topic's document, its flags in all verbs, and its
// presets.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace echelon {

// Adds the verb, for the program's help and completions. Its output comes from help_on().
void add_help(CLI::App& program);

// The help on a topic; on a verb ("bench", "comm"), its --help; on nothing, the program's --help and all
// topics. `columns`: the longest line. RequestError for other words, naming what was probably meant.
std::string help_on(const CLI::App& program, const std::vector<std::string>& words, int columns);

std::vector<std::string> topic_names();

}  // namespace echelon
