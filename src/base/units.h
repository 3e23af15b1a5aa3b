// Text forms of numbers for people.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

std::string format_bytes(double bytes);      // 1536 -> "1.50 KiB"
std::string format_count(double count);      // 124439808 -> "124.4M"
std::string format_seconds(double seconds);  // 95 -> "1m35s"

}  // namespace echelon
