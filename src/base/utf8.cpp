#include "base/utf8.h"

#include <cstdint>

namespace echelon {

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

}  // namespace echelon
