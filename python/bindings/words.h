// Keyword arguments of Python as the flags of a verb: what the command line takes, checks and refuses, Python
// does too, because it is the same table of flags.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace echelon::python {

// By the flag's name, with underscores; several values where a list was given. A switch is "on" or "off".
using Words = std::map<std::string, std::vector<std::string>>;
using Names = std::set<std::string>;

// Of flags: what they write or print is an attribute or a method of the answer, or has no meaning in Python.
extern const Names not_of_plan, not_of_train, not_of_verify, not_of_simulate, not_of_generate;
Names not_of_simulate_experts();

// As if these were given on the verb's command line. RequestError for one that the verb does not have.
void read_words(CLI::App& verb, const Words& words, const Names& hidden);

struct Keyword {
  std::string name, type, help, shown_default;
  bool is_switch = false, is_list = false;
};
// "plan", "train", "dry_run", "verify", "simulate", "simulate_experts" or "generate".
std::vector<Keyword> keywords_of(const std::string& verb);

}  // namespace echelon::python
