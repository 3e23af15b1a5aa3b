// The program as described by the tables of its flags: man pages, and completions for shells.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace echelon {

struct FlagDescription {
  std::vector<std::string> names;  // "--dp", "-h"; for a positional, only its name
  bool is_positional = false;
  bool takes_value = false;
  std::string type;            // "N", "on|off"
  std::string text, fallback;  // what it is for; its default if it has one
  std::string heading;
  std::vector<std::string> values;  // the values that can be listed: choices, presets, schedules
  bool takes_path = false;
};

struct CommandDescription {
  std::vector<std::string> words;  // "checkpoint", "info"; empty for the program
  std::string text, footer;
  std::vector<FlagDescription> flags;  // in the order of --help; flags under one heading are adjacent
  std::vector<CommandDescription> verbs;
};

// Leaves out what --help does not show. `app` is the program, after its verbs were added and its help
// arranged.
CommandDescription describe(const CLI::App& app);

// A page of section 1 in roff, for the program or one of its verbs; for a verb with verbs, it includes all of
// theirs.
std::string man_page(const CommandDescription& command, const std::string& version);

// The file that each shell sources, or finds by its name.
std::string bash_completion(const CommandDescription& program);
std::string zsh_completion(const CommandDescription& program);
std::string fish_completion(const CommandDescription& program);

// Adds the verb that writes all of these to a directory, for packagers; --help does not list it.
void add_describe(CLI::App& program, int& status);

}  // namespace echelon
