#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/open_file.h"

namespace echelon {

// XXH3-64 of some bytes.
std::uint64_t checksum(std::span<const std::byte> bytes);
// Of all bytes of a file.
std::uint64_t checksum(const OpenFile& file);

}  // namespace echelon
