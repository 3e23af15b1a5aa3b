#include "base/utf8.h"

#include <algorithm>
#include <cstdint>

namespace echelon {
namespace {

constexpr std::string_view replacement = "\xef\xbf\xbd";  // U+FFFD

// The bytes of the character that the text begins with; 0: it begins with none. Its number in `code`.
std::size_t first_character(std::string_view text, std::uint32_t& code) {
  const auto first = static_cast<unsigned char>(text.front());
  code = first;
  if (first < 0x80) return 1;
  const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  const std::string_view character = text.substr(0, bytes);
  if (character.size() < bytes || !is_utf8(character)) return 0;
  code = first & (0x7fu >> bytes);
  for (const char next : character.substr(1)) code = code << 6 | (static_cast<unsigned char>(next) & 0x3fu);
  return bytes;
}

bool is_control(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) ||       // C0, DEL, C1
         code == 0x200e || code == 0x200f || code == 0x61c ||  // direction marks
         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    std::uint32_t code = 0;
    const std::size_t bytes = first_character(text, code);
    valid += bytes == 0 ? replacement : text.substr(0, bytes);
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return valid;
}

std::string printable(std::string_view text, std::size_t most) {
  std::string shown;
  while (!text.empty()) {
    std::uint32_t code = 0;
    const std::size_t bytes = first_character(text, code);
    const bool blank = code == '\n' || code == '\r' || code == '\t';
    const std::string_view next = bytes == 0         ? replacement
                                  : blank            ? " "
                                  : is_control(code) ? replacement
                                                     : text.substr(0, bytes);
    if (shown.size() + next.size() > most) break;
    shown += next;
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return shown;
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    if (first < 0x80) continue;
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    if (first < 0xc2 || first > 0xf4) return false;
    std::uint32_t code = first & (0x3fu >> more);
    int left = more;
    for (; left > 0 && i < text.size(); --left) {
      const auto next = static_cast<unsigned char>(text[i]);
      if ((next & 0xc0u) != 0x80u) return false;
      code = code << 6 | (next & 0x3fu);
      ++i;
    }
    if (left > 0) return true;  // the end
    constexpr std::uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    if (code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
  }
  return true;
}

std::string_view without_byte_order_mark(std::string_view text) {
  constexpr std::string_view mark = "\xef\xbb\xbf";
  return text.starts_with(mark) ? text.substr(mark.size()) : text;
}

}  // namespace echelon
