// An f32 weight split into the bfloat16 that it rounds to and the rounding error. Together they are its 32
// bits, and take no more memory. (Split-SGD-BF16, Kalamkar et al. 2020, https://arxiv.org/abs/2005.04680,
// truncates to get the value; here it is the nearest.)
//
// The bits of an f32 are an integer that grows with its magnitude. The value is that integer divided by 2^16
// and rounded to nearest, halves away from zero; the remainder is what must be added to 2^16 times the value:
// from -2^15 to 2^15 - 1. (With ties to even, the midpoints on both sides of a value could round to it, and
// the remainder would need one more number.) All finite numbers and infinities are restored exactly; those at
// least half a unit above the largest bfloat16 have the value infinity. A NaN is restored as a NaN with its
// value's payload.
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
    if ((whole & 0x7fffffffu) > 0x7f800000u) {  // rounded as a number, NaN could become infinity or zero
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
