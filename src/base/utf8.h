// Text as UTF-8 (RFC 3629).
#pragma once

#include <string>
#include <string_view>

namespace echelon {

// Whether the text is UTF-8; a character cut off at the end is allowed.
bool is_utf8(std::string_view text);

// The text with U+FFFD in place of what is not UTF-8, which a path may contain.
std::string valid_utf8(std::string_view text);

// The text on one line, safe for a terminal: tabs and line ends become spaces; other control characters,
// those that change the text direction, and what is not UTF-8 become U+FFFD. Cut off after `most` bytes.
std::string printable(std::string_view text, std::size_t most = 4096);

// The text without the byte order mark that editors and spreadsheets on Windows write first.
std::string_view without_byte_order_mark(std::string_view text);

}  // namespace echelon
