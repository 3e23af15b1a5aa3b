// What C++20 has and the library of emscripten 3.1 (clang 14's) lacks. Included before every file of that build.
#pragma once

#ifdef __cplusplus
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <string>
#include <system_error>

namespace std {

template <class To, class From>
constexpr To bit_cast(const From& from) noexcept {
  return __builtin_bit_cast(To, from);
}

// As the standard says: no white space, no plus, no hexadecimal digits.
inline from_chars_result from_chars(const char* first, const char* last, double& value) {
  const string text(first, last);
  const bool has_sign = first != last && *first == '-';
  const size_t digits = has_sign ? 1 : 0;
  const bool is_hexadecimal =
      text.size() > digits + 1 && text[digits] == '0' && (text[digits + 1] == 'x' || text[digits + 1] == 'X');
  const bool begins = text.size() > digits &&
                      (text.find_first_of("0123456789.", digits) == digits ||
                       text.find_first_of("iInN", digits) == digits);
  if (!begins) return {first, errc::invalid_argument};
  if (is_hexadecimal) {
    value = has_sign ? -0.0 : 0.0;
    return {first + digits + 1, errc()};
  }
  char* end = nullptr;
  const int before = errno;
  errno = 0;
  const double read = strtod(text.c_str(), &end);
  const bool is_out_of_range = errno == ERANGE;
  errno = before;
  if (end == text.c_str()) return {first, errc::invalid_argument};
  const char* const stop = first + (end - text.c_str());
  if (is_out_of_range) return {stop, errc::result_out_of_range};
  value = read;
  return {stop, errc()};
}

}  // namespace std
#endif
