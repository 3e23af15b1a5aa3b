// Enums whose values have names. Values count from 0, and their names stand beside the enum.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstddef>
#include <string>

#include "base/error.h"

namespace echelon {

// Specialised for each such enum.
template <class E>
inline constexpr std::array<const char*, 0> choice_names{};

template <class E>
constexpr const char* name_of(E value) {
  return choice_names<E>[static_cast<std::size_t>(value)];
}

// The value with this name. RequestError naming `field` and the legal names if there is none.
template <class E>
E parse_choice(const std::string& text, const std::string& field) {
  for (std::size_t i = 0; i < choice_names<E>.size(); ++i)
    if (text == choice_names<E>[i]) return static_cast<E>(i);
  refuse("{} {}: no such value; legal: {}", field, text, fmt::join(choice_names<E>, ", "));
}

}  // namespace echelon
