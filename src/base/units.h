// Numbers as text for people.
#pragma once

#include <cstdint>
#include <string>

namespace echelon {

inline constexpr double seconds_a_day = 86'400;

std::string format_bytes(double bytes);  // 1536 -> "1.50 KiB"
// In powers of 1000, as devices' memories are sold: "78.1 GB", or "10.5 MB" below a tenth of one. Small
// differences stay visible: "21.3 kB".
std::string format_device_memory(double bytes);
double device_memory_unit(double bytes);  // 1e9, 1e6, 1e3 or 1
// "1 layer", "2 layers", "2 microbatches".
std::string counted(std::int64_t count, const std::string& one);
// "1536", "1.5KiB", "64 MB": a number above 0 and B, KB, KiB, MB, MiB, GB, GiB, TB, TiB or nothing (bytes).
// RequestError naming `field` otherwise.
std::int64_t parse_bytes(const std::string& text, const std::string& field);
std::string format_count(double count);            // 124439808 -> "124.4M"
std::string format_seconds(double seconds);        // 95 -> "1m35s", 0.005 -> "5ms"
std::string format_whole_seconds(double seconds);  // 95.2 -> "1m35s", 0.7 -> "1s"

}  // namespace echelon
