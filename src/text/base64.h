#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace echelon {

// The bytes (RFC 4648). RequestError that begins with `where` for any other character.
inline std::string from_base64(std::string_view text, std::string_view where) {
  std::string bytes;
  std::uint32_t held = 0;
  int bits = 0;
  for (const char c : text) {
    if (c == '=') break;
    const auto at =
        std::string_view("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/").find(c);
    if (at == std::string_view::npos) refuse("{}: is not base64", where);
    held = held << 6 | static_cast<std::uint32_t>(at);
    bits += 6;
    if (bits >= 8) bytes += static_cast<char>(held >> (bits -= 8) & 0xffu);
  }
  return bytes;
}

}  // namespace echelon
