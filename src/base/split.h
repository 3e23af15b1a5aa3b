// Ranges, and the one rule by which everything that need not divide evenly is divided.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>

namespace echelon {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Part `index` of `length` cut into `parts` contiguous pieces whose sizes differ by at most one; the first
// length % parts pieces are larger. Pieces may be empty.
inline Range split_range(std::int64_t length, std::int64_t parts, std::int64_t index) {
  const std::int64_t small = length / parts, larger = length % parts;
  const std::int64_t begin = index * small + (index < larger ? index : larger);
  return {begin, begin + small + (index < larger ? 1 : 0)};
}

inline std::int64_t sum_of(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace echelon
