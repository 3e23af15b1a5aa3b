// bfloat16: the upper half of an f32, with 8 significant bits. Only a storage format; arithmetic is in float.
// Conversion to float is implicit and exact; conversion back rounds and is explicit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/host_device.h"

namespace echelon {

// Rounds x to an f32 that rounds further to any narrower format exactly as x itself does: if it is inexact,
// its last bit is set (rounding to odd; Boldo & Melquiond 2008).
ECHELON_HOST_DEVICE inline float rounded_to_odd(double x) {
  const auto nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || !std::isfinite(nearest)) return nearest;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(x)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

struct bf16 {
  bf16() = default;
  // To nearest, ties to even: |error| <= 2^-8 |x|, or 2^-134 if x is below the smallest normal number. Beyond
  // the largest number, infinity; NaN stays NaN.
  ECHELON_HOST_DEVICE explicit bf16(float x) : bits(rounded(x)) {}
  ECHELON_HOST_DEVICE explicit bf16(double x) : bf16(rounded_to_odd(x)) {}
  ECHELON_HOST_DEVICE operator float() const {  // NOLINT(google-explicit-constructor)
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  ECHELON_HOST_DEVICE static bf16 of_bits(std::uint16_t bits) {
    bf16 x;
    x.bits = bits;
    return x;
  }
  // Stochastic rounding (Gupta et al. 2015, https://arxiv.org/abs/1502.02551): up or down with probabilities
  // that make the expected value x. The lower half of x is the distance in 65536ths to the next bfloat16 away
  // from zero. `random`: 16 uniform bits.
  ECHELON_HOST_DEVICE static bf16 stochastic(float x, std::uint16_t random) {
    const auto whole = std::bit_cast<std::uint32_t>(x);
    return std::isfinite(x) ? of_bits(static_cast<std::uint16_t>((whole + random) >> 16)) : bf16(x);
  }

  std::uint16_t bits;

 private:
  ECHELON_HOST_DEVICE static std::uint16_t rounded(float x) {
#ifdef __CUDA_ARCH__
    std::uint16_t of_device;  // by one instruction, the same but for which NaN a NaN becomes
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(of_device) : "f"(x));
    return of_device;
#else
    const auto whole = std::bit_cast<std::uint32_t>(x);
    // Bit 6 keeps a NaN whose payload lies in the lower half from becoming infinity.
    const std::uint32_t upper = (whole & 0x7fffffffu) > 0x7f800000u
                                    ? whole >> 16 | 0x40u
                                    : (whole + 0x7fffu + (whole >> 16 & 1u)) >> 16;
    return static_cast<std::uint16_t>(upper);
#endif
  }
};
static_assert(std::is_trivially_copyable_v<bf16> && sizeof(bf16) == 2);

// The type in which numbers stored as T are computed and summed, and in which their weight gradients,
// statistics and losses are kept.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, bf16>, float, T>;

}  // namespace echelon

template <>
struct std::numeric_limits<echelon::bf16> {
  static constexpr bool is_specialized = true, is_integer = false, is_signed = true, has_infinity = true,
                        has_quiet_NaN = true;
  static constexpr int digits = 8;
  static echelon::bf16 epsilon() { return echelon::bf16::of_bits(0x3c00); }  // 2^-7
  static echelon::bf16 min() { return echelon::bf16::of_bits(0x0080); }
  static echelon::bf16 max() { return echelon::bf16::of_bits(0x7f7f); }
  static echelon::bf16 lowest() { return echelon::bf16::of_bits(0xff7f); }
  static echelon::bf16 infinity() { return echelon::bf16::of_bits(0x7f80); }
  static echelon::bf16 quiet_NaN() { return echelon::bf16::of_bits(0x7fc0); }
};
