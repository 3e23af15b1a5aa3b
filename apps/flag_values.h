// Flags with numbers.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/parse_number.h"

namespace echelon {

inline bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The parts of a value such as "1:4" or "a,b", without surrounding blanks.
std::vector<std::string> split(const std::string& text, const char* separators);

// "1:4". RequestError says what it must be, such as "a rank and how many times slower it is, as 1:4".
template <class A, class B>
std::pair<A, B> parse_pair(const std::string& flag, const std::string& text, const char* meaning) {
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) refuse("{} {}: must be {}", flag, text, meaning);
  return {parse_number<A>(flag, text.substr(0, colon)), parse_number<B>(flag, text.substr(colon + 1))};
}

// A flag with a number, whose initial value is shown as the default.
template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& flag, T& value, const std::string& description) {
  const auto set = [flag, &value](const std::string& text) { value = parse_number<T>(flag, text); };
  return app.add_option_function<std::string>(flag, set, description)
      ->type_name(std::is_integral_v<T> ? "N" : "X")
      ->default_str(fmt::format("{}", value));
}
// A flag without a default.
template <class T>
CLI::Option* add_number(CLI::App& app, const std::string& flag, std::optional<T>& value,
                        const std::string& description) {
  const auto set = [flag, &value](const std::string& text) { value = parse_number<T>(flag, text); };
  return app.add_option_function<std::string>(flag, set, description)
      ->type_name(std::is_integral_v<T> ? "N" : "X");
}

}  // namespace echelon
