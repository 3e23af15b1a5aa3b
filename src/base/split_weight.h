// An f32 weight as the bfloat16 that it rounds to and what that rounds off: together they are its 32 bits, in
// no more memory than they. (Split-SGD-BF16, Kalamkar et al. 2020, https://arxiv.org/abs/2005.04680, where
// the value is what is left when the lower half is cut off; here it is the nearest.)
//
// The bits of an f32 are a number that grows with its magnitude. The value is that number divided by 2^16 and
// rounded to nearest, halves away from zero; the remainder is what is to be added to 2^16 times the value:
// from -2^15 to 2^15 - 1. To even, both neighbours could have rounded to the same value from the middle
// between them. All finite numbers and infinities come back as they were; those above the largest bfloat16 by
// half a unit have the value infinity. A NaN comes back as a NaN whose payload is that of its value.
#pragma once

#include <bit>
#include <cstdint>

#include "base/bf16.h"
#include "base/host_device.h"

namespace echelon {

struct SplitWeight {
  SplitWeight() = default;
  ECHELON_HOST_DEVICE explicit SplitWeight(float weight) {
    const auto whole = std::bit_cast<std::uint32_t>(weight);
    if ((whole & 0x7fffffffu) > 0x7f800000u) {  // rounded as a number it could become infinite, or a zero
      value = bf16(weight);
      remainder = 0;
      return;
    }
    value = bf16::of_bits(static_cast<std::uint16_t>((whole + 0x8000u) >> 16));
    remainder = static_cast<std::int16_t>(static_cast<std::uint16_t>(whole));
  }
  ECHELON_HOST_DEVICE SplitWeight(bf16 v, std::int16_t r) : value(v), remainder(r) {}

  ECHELON_HOST_DEVICE float joined() const {
    return std::bit_cast<float>((static_cast<std::uint32_t>(value.bits) << 16) +
                                static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder)));
  }

  bf16 value;
  std::int16_t remainder;
};

}  // namespace echelon
