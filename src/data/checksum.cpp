#include "data/checksum.h"

#include <xxhash.h>

namespace echelon {

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace echelon
