// The program as the tables of its flags describe it: man pages, and completions for shells.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace echelon {

struct FlagDescription {
  std::vector<std::string> names;  // "--dp", "-h"; of a positional its name alone
  bool is_positional = false;
  bool takes_value = false;
  std::string type;            // "N", "on|off"
  std::string text, fallback;  // what it is for; its default where it has one
  std::string heading;
  std::vector<std::string> values;  // that can be named: choices, presets, schedules
  bool takes_path = false;
};

struct CommandDescription {
  std::vector<std::string> words;  // "checkpoint", "info"; none of the program
  std::string text, footer;
  std::vector<FlagDescription> flags;  // in the order of --help; those under a heading stand together
  std::vector<CommandDescription> verbs;
};

// Without what --help does not show. `app` is the program, its verbs added and its help arranged.
CommandDescription describe(const CLI::App& app);

// A page of section 1 in roff, of the program or one of its verbs; of a verb that has verbs with all of
// theirs.
std::string man_page(const CommandDescription& command, const std::string& version);

// What each shell is to source, or finds by its file's name.
std::string bash_completion(const CommandDescription& program);
std::string zsh_completion(const CommandDescription& program);
std::string fish_completion(const CommandDescription& program);

// Adds the verb that writes them all to a directory, which --help does not list: for who packages the
// program.
void add_describe(CLI::App& program, int& status);

}  // namespace echelon
