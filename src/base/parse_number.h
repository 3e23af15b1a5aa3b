// Numbers from texts, all of which must be one.
#pragma once

#include <string>

namespace echelon {

// As a T (int, std::int64_t, std::uint64_t, double); RequestError naming `field` otherwise.
template <class T>
T parse_number(const std::string& field, const std::string& text);

}  // namespace echelon
