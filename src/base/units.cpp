#include "base/units.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>

#include "base/error.h"

namespace echelon {

std::string format_bytes(double bytes) {
  static constexpr std::array names{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  while (bytes >= 1024.0 && unit + 1 < names.size()) {
    bytes /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, names[unit]);
}

double device_memory_unit(double bytes) {
  return bytes >= 1e8 ? 1e9 : bytes >= 1e5 ? 1e6 : bytes >= 1e3 ? 1e3 : 1;
}

std::string format_device_memory(double bytes) {
  const double unit = device_memory_unit(bytes);
  if (unit == 1) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.1f} {}", bytes / unit, unit == 1e9 ? "GB" : unit == 1e6 ? "MB" : "kB");
}

std::string counted(std::int64_t count, const std::string& one) {
  if (count == 1) return "1 " + one;
  return fmt::format("{} {}{}", count, one, one.ends_with("ch") ? "es" : "s");
}

std::int64_t parse_bytes(const std::string& text, const std::string& field) {
  double number = 0;
  const char* const end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, number);
  while (rest != end && *rest == ' ') ++rest;
  const std::string unit(rest, end);
  static const std::map<std::string, double> units{
      {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  const auto found = units.find(unit);
  const double bytes = error == std::errc() && found != units.end() ? number * found->second : 0;
  if (!(bytes >= 1 && bytes < 0x1p60))
    refuse("{} {}: must be a number of bytes, such as 800MiB or 1.5GB", field, text);
  return static_cast<std::int64_t>(bytes);
}

std::string format_count(double count) {
  if (count >= 1e12) return fmt::format("{:.2f}T", count / 1e12);
  if (count >= 1e9) return fmt::format("{:.2f}B", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.1f}M", count / 1e6);
  if (count >= 1e4) return fmt::format("{:.1f}K", count / 1e3);
  return fmt::format("{:.0f}", count);
}

std::string format_seconds(double seconds) {
  // A unit ends where rounding would reach the next.
  if (seconds == 0) return "0s";
  if (seconds < 0.0009995) return fmt::format("{:.0f}us", seconds * 1e6);
  if (seconds < 0.9995) return fmt::format("{:.0f}ms", seconds * 1e3);
  if (seconds < 59.95) return fmt::format("{:.1f}s", seconds);
  return format_whole_seconds(seconds);
}

std::string format_whole_seconds(double seconds) {
  const auto whole = static_cast<std::int64_t>((seconds > 0 ? std::min(seconds, 1e12) : 0) + 0.5);
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
}

}  // namespace echelon
