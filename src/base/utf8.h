// Text as UTF-8 (RFC 3629).
#pragma once

#include <string_view>

namespace echelon {

// Whether it is UTF-8; a character that the end cuts off does not count against it.
bool is_utf8(std::string_view text);

}  // namespace echelon
