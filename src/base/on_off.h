// Switches as people write them: "on" or "off".
#pragma once

#include <string>

#include "base/error.h"

namespace echelon {

inline const char* on_or_off(bool is_on) { return is_on ? "on" : "off"; }

// RequestError naming `field` for another text.
inline bool parse_on_or_off(const std::string& field, const std::string& text) {
  if (text != "on" && text != "off") refuse("{} {}: legal: on, off", field, text);
  return text == "on";
}

}  // namespace echelon
