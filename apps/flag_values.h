// Flags that say numbers.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <type_traits>

#include "base/parse_number.h"

namespace echelon {

// A flag with a number, whose starting value is shown as the default.
template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& flag, T& value, const std::string& description) {
  const auto set = [flag, &value](const std::string& text) { value = parse_number<T>(flag, text); };
  return app.add_option_function<std::string>(flag, set, description)
      ->type_name(std::is_integral_v<T> ? "N" : "X")
      ->default_str(fmt::format("{}", value));
}
// One that has no default.
template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& flag, std::optional<T>& value,
                        const std::string& description) {
  const auto set = [flag, &value](const std::string& text) { value = parse_number<T>(flag, text); };
  return app.add_option_function<std::string>(flag, set, description)
      ->type_name(std::is_integral_v<T> ? "N" : "X");
}

}  // namespace echelon
