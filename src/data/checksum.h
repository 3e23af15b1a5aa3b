#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace echelon {

// XXH3-64 of some bytes.
std::uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace echelon
