// fp8: a sign, and 4 bits of exponent and 3 of fraction (e4m3), or 5 and 2 (e5m2), as tensor cores multiply
// them (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). A form of operands, never computed in.
// Every one of its numbers is a bf16 too.
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
  int largest_exponent;  // of 2; the largest number is 1.75 times that power
};
ECHELON_HOST_DEVICE constexpr Fp8Shape shape_of(Fp8 format) {
  return format == Fp8::e4m3 ? Fp8Shape{3, 7, 448.0f, 8} : Fp8Shape{2, 15, 57344.0f, 15};
}

// 2^exponent, of a float that is no subnormal.
ECHELON_HOST_DEVICE inline float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// The number of the format that is nearest, of two the even one; |error| <= 2^-4 |x| (e4m3) or 2^-3 |x|
// (e5m2), or half the smallest number where x is below the smallest normal one. Beyond the largest one that
// one, whatever its size; NaN stays NaN.
ECHELON_HOST_DEVICE inline float rounded_to_fp8(float x, Fp8 format) {
  const Fp8Shape shape = shape_of(format);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), sign = bits & 0x80000000u;
  const std::uint32_t size = bits ^ sign;
  if (size > 0x7f800000u) return x;
  const float magnitude = std::bit_cast<float>(size), least_normal = power_of_two(1 - shape.bias);
  float rounded;
  if (magnitude < least_normal) {
    // Where floats are as far apart as these numbers the sum is rounded to one of them.
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

// Its 8 bits. NaN has all but the sign set.
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

// The number that 8 bits are.
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

// What numbers are multiplied by before they are rounded, the largest of which in magnitude is `largest`: the
// largest power of two with which that one still is a number of the format, so that its factor costs no
// digit, and none of them is beyond the last one. At most 2^100, so that what is rounded and divided by it
// again is no subnormal f32. Of what has an infinity or no number NaN: its product is none either.
ECHELON_HOST_DEVICE inline float fp8_scale(float largest, Fp8 format) {
  if (!(largest <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(largest);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const int over = (bits & 0x7fffffu) > 0x600000u ? 1 : 0;  // above 1.75
  const int power = shape_of(format).largest_exponent - exponent - over;
  return power_of_two(power < 100 ? power : 100);
}

}  // namespace echelon
