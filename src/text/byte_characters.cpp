#include "text/byte_characters.h"

#include <array>

#include "text/unicode.h"

namespace echelon {
namespace {

struct Table {
  std::array<char32_t, 256> character{};
  std::array<int, 324> byte{};
  constexpr Table() {
    for (int& b : byte) b = -1;
    char32_t next = 256;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      const char32_t c = printable ? static_cast<char32_t>(b) : next++;
      character[static_cast<std::size_t>(b)] = c;
      byte[c] = b;
    }
  }
};
constexpr Table table;

}  // namespace

std::string bytes_as_characters(std::string_view bytes) {
  std::string characters;
  for (const char b : bytes) append_character(characters, table.character[static_cast<unsigned char>(b)]);
  return characters;
}

std::optional<std::string> characters_as_bytes(std::string_view characters) {
  std::string bytes;
  for (std::size_t i = 0; i < characters.size();) {
    const char32_t c = next_character(characters, i);
    if (c >= table.byte.size() || table.byte[c] < 0) return std::nullopt;
    bytes += static_cast<char>(table.byte[c]);
  }
  return bytes;
}

}  // namespace echelon
