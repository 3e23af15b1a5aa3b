#include "base/parse_number.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace echelon {
namespace {

constexpr const char* digits = "0123456789";

template <class T>
std::errc read_all(const std::string& text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop != end ? std::errc::invalid_argument : error;
}

// "12", "1.5", "-3": neither a letter nor an exponent.
bool is_decimal(const std::string& text) {
  const std::size_t sign = text.starts_with('-') ? 1 : 0;
  return text.find_first_of(digits) != text.npos &&
         text.find_first_not_of("0123456789.", sign) == text.npos &&
         std::count(text.begin(), text.end(), '.') <= 1;
}

// "15T" -> "15e12"; as it is without such a letter.
std::string with_exponent(const std::string& text) {
  const std::string number = text.substr(0, text.empty() ? 0 : text.size() - 1);
  if (text.empty() || !is_decimal(number)) return text;
  switch (text.back()) {
    case 'B':
    case 'b':
      return number + "e9";
    case 'T':
    case 't':
      return number + "e12";
    default:
      return text;
  }
}

// "1.5e3" -> "1500", "2.0" -> "2", digit by digit, so that nothing is rounded. None where it is not whole.
std::optional<std::string> whole(const std::string& text) {
  const std::size_t e = text.find_first_of("eE");
  const std::string mantissa = text.substr(0, e);
  if (!is_decimal(mantissa)) return {};
  int exponent = 0;
  if (e != text.npos) {
    const std::string power = text.substr(e + (text.substr(e + 1).starts_with('+') ? 2 : 1));
    if (read_all(power, exponent) != std::errc() || exponent > 400 || exponent < -400) return {};
  }
  const std::string sign = mantissa.starts_with('-') ? "-" : "";
  const std::size_t point = std::min(mantissa.find('.'), mantissa.size());
  std::string all = mantissa.substr(sign.size(), point - sign.size());
  const auto before = static_cast<std::ptrdiff_t>(all.size()) + exponent;  // digits before the point
  if (point < mantissa.size()) all += mantissa.substr(point + 1);
  if (before > std::ssize(all)) all.append(static_cast<std::size_t>(before - std::ssize(all)), '0');
  const auto kept = static_cast<std::size_t>(std::max<std::ptrdiff_t>(before, 0));
  if (all.find_first_not_of('0', kept) != all.npos) return {};
  all.resize(kept);
  return sign + (all.empty() ? "0" : all);
}

template <class T>
std::errc read_number(const std::string& text, T& value) {
  if constexpr (std::is_integral_v<T>) {
    const auto as_digits = whole(with_exponent(text));
    return as_digits ? read_all(*as_digits, value) : std::errc::invalid_argument;
  } else {
    return read_all(with_exponent(text), value);
  }
}

// "8k" -> "8000", "8192", of which it could be either.
template <class T>
void refuse_two_meanings(const std::string& field, const std::string& text) {
  constexpr std::array<std::pair<const char*, int>, 3> letters{{{"kK", 1}, {"mM", 2}, {"gG", 3}}};
  const std::string number = text.substr(0, text.empty() ? 0 : text.size() - 1);
  if (!is_decimal(number)) return;
  for (const auto& [either, thousands] : letters) {
    if (std::string(either).find(text.back()) == std::string::npos) continue;
    double factor = 0;
    std::vector<std::string> legal;
    if (read_all(number, factor) != std::errc()) return;
    for (double thousand : {1e3, 0x1p10}) {
      const double meant = factor * std::pow(thousand, thousands);
      T value{};
      if (std::is_integral_v<T> && std::trunc(meant) != meant) continue;
      if (read_number(fmt::format("{:.17g}", meant), value) == std::errc())
        legal.push_back(fmt::format("{}", value));
    }
    if (legal.size() == 2)
      refuse("{} {}: {} may be 10^{} or 2^{}; legal: {}", field, text, text.back(), 3 * thousands,
             10 * thousands, fmt::join(legal, ", "));
  }
}

template <class T>
[[noreturn]] void refuse_text(const std::string& field, const std::string& text, std::errc error,
                              const char* how) {
  if (error == std::errc::result_out_of_range) refuse("{} {}: too large or too small a number", field, text);
  refuse("{} {}: must be a {}{}", field, text,
         !std::is_integral_v<T>  ? "number"
         : std::is_unsigned_v<T> ? "whole number of at least 0"
                                 : "whole number",
         text.find_first_of(digits) == 0 ? how : "");
}

}  // namespace

template <class T>
T parse_plain_number(const std::string& field, const std::string& text) {
  T value{};
  if (const std::errc error = read_all(text, value); error != std::errc())
    refuse_text<T>(field, text, error, "");
  return value;
}

template <class T>
T parse_number(const std::string& field, const std::string& text) {
  T value{};
  const std::errc error = read_number(text, value);
  if (error == std::errc()) return value;
  refuse_two_meanings<T>(field, text);
  refuse_text<T>(field, text, error, ", written as 4096, 1e9 or 15T");
}
template int parse_plain_number(const std::string&, const std::string&);
template double parse_plain_number(const std::string&, const std::string&);
template int parse_number(const std::string&, const std::string&);
template std::int64_t parse_number(const std::string&, const std::string&);
template std::uint64_t parse_number(const std::string&, const std::string&);
template double parse_number(const std::string&, const std::string&);

}  // namespace echelon
