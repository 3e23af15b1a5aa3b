// fp8: a sign, with 4 bits of exponent and 3 of fraction (e4m3) or 5 and 2 (e5m2), as tensor cores multiply
// them (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). Only a format of operands; there is no
// arithmetic in it. Every fp8 number is also a bf16.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/host_device.h"

namespace echelon {

// e4m3 has no infinity.
enum class Fp8 { e4m3, e5m2 };

struct Fp8Shape {
  int fraction_bits, bias;
  float largest;
  int largest_exponent;  // the largest number is 1.75 times 2 to this
};
ECHELON_HOST_DEVICE constexpr Fp8Shape shape_of(Fp8 format) {
  return format == Fp8::e4m3 ? Fp8Shape{3, 7, 448.0f, 8} : Fp8Shape{2, 15, 57344.0f, 15};
}

// 2^exponent, if that is not a subnormal float.
ECHELON_HOST_DEVICE inline float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// The nearest number of the format, ties to even; |error| <= 2^-4 |x| (e4m3) or 2^-3 |x| (e5m2), or half the
// smallest number if x is below the smallest normal one. Saturates at the largest number, also for infinity;
// NaN stays NaN.
ECHELON_HOST_DEVICE inline float rounded_to_fp8(float x, Fp8 format) {
  const Fp8Shape shape = shape_of(format);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), sign = bits & 0x80000000u;
  const std::uint32_t size = bits ^ sign;
  if (size > 0x7f800000u) return x;
  const float magnitude = std::bit_cast<float>(size), least_normal = power_of_two(1 - shape.bias);
  float rounded;
  if (magnitude < least_normal) {
    // Adding a number at which floats have this spacing rounds the sum to a multiple of it.
    const float apart = power_of_two(1 - shape.bias - shape.fraction_bits + 23);
    rounded = (magnitude + apart) - apart;
  } else {
    const int cut = 23 - shape.fraction_bits;
    const std::uint32_t half = 1u << (cut - 1), is_odd = size >> cut & 1u;
    rounded = std::bit_cast<float>((size + (half - 1 + is_odd)) >> cut << cut);
  }
  if (!(rounded <= shape.largest)) rounded = shape.largest;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(rounded) | sign);
}

// The 8 bits of x, rounded. For NaN all bits but the sign are set.
ECHELON_HOST_DEVICE inline std::uint8_t fp8_bits(float x, Fp8 format) {
  const Fp8Shape shape = shape_of(format);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(rounded_to_fp8(x, format));
  const std::uint32_t size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (size > 0x7f800000u) return 0x7f;
  const float magnitude = std::bit_cast<float>(size);
  if (magnitude < power_of_two(1 - shape.bias))
    return static_cast<std::uint8_t>(
        sign | static_cast<std::uint32_t>(magnitude * power_of_two(shape.bias - 1 + shape.fraction_bits)));
  const std::uint32_t lower = static_cast<std::uint32_t>(127 - shape.bias) << shape.fraction_bits;
  return static_cast<std::uint8_t>(sign | ((size >> (23 - shape.fraction_bits)) - lower));
}

// The number with these 8 bits.
ECHELON_HOST_DEVICE inline float fp8_value(std::uint8_t code, Fp8 format) {
  const Fp8Shape shape = shape_of(format);
  const std::uint32_t size = code & 0x7fu, sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t exponent = size >> shape.fraction_bits;
  const bool is_special = format == Fp8::e4m3 ? size == 0x7f : exponent == 31;
  std::uint32_t magnitude = 0;
  if (is_special) {
    magnitude = format == Fp8::e5m2 && size == 0x7c ? 0x7f800000u : 0x7fc00000u;
  } else if (exponent == 0) {
    magnitude = std::bit_cast<std::uint32_t>(static_cast<float>(size) *
                                             power_of_two(1 - shape.bias - shape.fraction_bits));
  } else {
    magnitude = (size << (23 - shape.fraction_bits)) + (static_cast<std::uint32_t>(127 - shape.bias) << 23);
  }
  return std::bit_cast<float>(magnitude | sign);
}

// The factor of numbers before they are rounded, whose largest magnitude is `largest`: the largest power of
// two with which that one is still within the format. A power of two costs no precision, and nothing
// saturates. At most 2^100, so that a rounded number divided by the factor is no subnormal f32. NaN if
// `largest` is infinite or NaN, so that products are NaN too.
ECHELON_HOST_DEVICE inline float fp8_scale(float largest, Fp8 format) {
  if (!(largest <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(largest);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const int over = (bits & 0x7fffffu) > 0x600000u ? 1 : 0;  // above 1.75
  const int power = shape_of(format).largest_exponent - exponent - over;
  return power_of_two(power < 100 ? power : 100);
}

}  // namespace echelon
