#include "base/parse_number.h"

#include <charconv>
#include <cstdint>

#include "base/error.h"

namespace echelon {

template <class T>
T parse_number(const std::string& flag, const std::string& text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && stop == end) return value;
  if (error == std::errc::result_out_of_range) refuse("{} {}: too large or too small a number", flag, text);
  refuse("{} {}: must be a {}", flag, text,
         !std::is_integral_v<T>  ? "number"
         : std::is_unsigned_v<T> ? "whole number of at least 0"
                                 : "whole number");
}
template int parse_number(const std::string&, const std::string&);
template std::int64_t parse_number(const std::string&, const std::string&);
template std::uint64_t parse_number(const std::string&, const std::string&);
template double parse_number(const std::string&, const std::string&);

}  // namespace echelon
