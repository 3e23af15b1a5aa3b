// A command as one would type it.
#pragma once

#include <CLI/CLI.hpp>
#include <set>
#include <string>

namespace echelon {

// "echelon plan --gpus 64 --out 'my plan.toml'": a parsed verb with the flags that it was given, except those
// left out, quoted for a shell.
std::string command_text(const CLI::App& verb, const std::set<std::string>& left_out = {});

}  // namespace echelon
