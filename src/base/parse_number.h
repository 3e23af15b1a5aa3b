// Parses texts that must be a single number.
#pragma once

#include <string>

namespace echelon {

// Parses a T (int, std::int64_t, std::uint64_t, double) as people write it. Whole numbers may also have an
// exponent, or the field's letters for powers of ten: B for 10^9 and T for 10^12 ("1e12", "1.5e3", "15T"). k,
// M and G are ambiguous, and are refused with both readings. RequestError naming `field` otherwise.
template <class T>
T parse_number(const std::string& field, const std::string& text);

// Parses it as programs write it to files: a whole number is digits only.
template <class T>
T parse_plain_number(const std::string& field, const std::string& text);

}  // namespace echelon
