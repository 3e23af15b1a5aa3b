// toml++ with assertions that throw. Version 3.3 asserts on some texts that are not TOML (a lone "["), which
// would abort the program, or with NDEBUG be undefined behaviour.
#pragma once

#ifndef TOML_HEADER_ONLY
#define TOML_HEADER_ONLY 1
#endif

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "base/error.h"

namespace echelon {

struct NotToml {};
constexpr void assert_toml(bool holds) {
  if (!holds) throw NotToml{};
}

}  // namespace echelon

#pragma push_macro("NDEBUG")
#undef NDEBUG
#define TOML_ASSERT(holds) ::echelon::assert_toml(static_cast<bool>(holds))
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

namespace echelon {

inline toml::table parse_toml(const std::string& text, const std::string& where) {
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    refuse("{}, line {}: not TOML: {}", where, error.source().begin.line, error.description());
  } catch (const NotToml&) {
    refuse("{}: not TOML", where);
  }
}

// A value as the file has it, on one line, cut short if long.
inline std::string shown(const toml::node& node) {
  std::ostringstream text;
  text << toml::node_view<const toml::node>(&node);
  std::string line = text.str();  // a table has several lines
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line.size() > 60 ? line.substr(0, 57) + "..." : line;
}

// A text as TOML has it.
inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (code < 0x20 || code == 0x7f) {
      out += fmt::format("\\u{:04x}", code);
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace echelon
