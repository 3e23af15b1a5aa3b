// A command as it would be typed again.
#pragma once

#include <CLI/CLI.hpp>
#include <set>
#include <string>

namespace echelon {

// "echelon plan --gpus 64 --out 'my plan.toml'": a parsed verb with the flags that it was given, but for those
// left out, quoted for a shell.
std::string command_text(const CLI::App& verb, const std::set<std::string>& left_out = {});

}  // namespace echelon
