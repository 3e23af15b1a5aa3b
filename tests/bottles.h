// A text to train on that is made at once, and whose lines are alike.
#pragma once

#include <fmt/format.h>

#include <string>

namespace echelon::checks {

inline std::string bottles(int lines) {
  std::string text;
  for (int i = 0; i < lines; ++i) text += fmt::format("{} bottles of {} on the wall\n", i, i * i);
  return text;
}

}  // namespace echelon::checks
