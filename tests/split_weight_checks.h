// What a split weight must be, of one pattern of bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/split_weight.h"

namespace echelon {

// What is wrong, or null. What is nearest is known from bf16's own rounding, but in the middle.
inline const char* wrong_split(std::uint32_t bits) {
  const auto weight = std::bit_cast<float>(bits);
  const SplitWeight split(weight);
  const float joined = split.joined();
  if (std::isnan(weight))
    return std::isnan(joined) && std::isnan(static_cast<float>(split.value)) ? nullptr : "a NaN is a number";
  if (std::bit_cast<std::uint32_t>(joined) != bits) return "another weight comes back";
  const bool middle = (bits & 0xffff) == 0x8000;
  const std::uint32_t nearest = middle ? (bits >> 16) + 1 : bf16(weight).bits;
  return split.value.bits == nearest ? nullptr : "another value is nearer, or as near and further from zero";
}

}  // namespace echelon
