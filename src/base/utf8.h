// Text as UTF-8 (RFC 3629).
#pragma once

#include <string>
#include <string_view>

namespace echelon {

// Whether it is UTF-8; a character that the end cuts off does not count against it.
bool is_utf8(std::string_view text);

// The text with U+FFFD for what is not UTF-8, as a path may be.
std::string valid_utf8(std::string_view text);

// The text as it may reach a terminal, on one line: a tab or an end of line becomes a space; other control
// characters, those that turn the direction of what follows, and what is not UTF-8 become U+FFFD. Of more
// than `most` bytes the rest is cut off.
std::string printable(std::string_view text, std::size_t most = 4096);

}  // namespace echelon
