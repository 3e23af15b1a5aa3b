// Numbers from texts, all of which must be one.
#pragma once

#include <string>

namespace echelon {

// As a T (int, std::int64_t, std::uint64_t, double), as people write it: whole numbers too may have an
// exponent, and the field's own letters stand for powers of ten, B for 10^9 and T for 10^12 ("1e12", "1.5e3",
// "15T"). k, M and G would be of two kinds, and are refused with both. RequestError naming `field` otherwise.
template <class T>
T parse_number(const std::string& field, const std::string& text);

// As programs write it to files: digits alone where it is whole.
template <class T>
T parse_plain_number(const std::string& field, const std::string& text);

}  // namespace echelon
