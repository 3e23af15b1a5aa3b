#include "base/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/bf16.h"

namespace echelon::fp8_test {
namespace {

constexpr Fp8 formats[] = {Fp8::e4m3, Fp8::e5m2};
constexpr float infinity = std::numeric_limits<float>::infinity();

// What a code means, by its definition (table 1 of arXiv:2209.05433).
double meaning(int code, Fp8 format) {
  const int fraction_bits = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
  const int exponent = (code & 0x7f) >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
  const double sign = (code & 0x80) != 0 ? -1 : 1, part = std::ldexp(fraction, -fraction_bits);
  if (format == Fp8::e4m3 && (code & 0x7f) == 0x7f) return std::nan("");
  if (format == Fp8::e5m2 && exponent == 31) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  return sign * (exponent == 0 ? std::ldexp(part, 1 - bias) : std::ldexp(1 + part, exponent - bias));
}

TEST(Fp8, EveryCodeIsItsNumber) {
  for (const Fp8 format : formats)
    for (int code = 0; code < 256; ++code) {
      const float value = fp8_value(static_cast<std::uint8_t>(code), format);
      const double expected = meaning(code, format);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << code;
        ASSERT_EQ(fp8_bits(value, format), 0x7f);
        continue;
      }
      ASSERT_EQ(static_cast<double>(value), expected) << code;
      ASSERT_EQ(std::signbit(value), code >= 0x80) << code;
      ASSERT_EQ(float{bf16(value)}, value) << "no bf16: " << code;
      if (!std::isfinite(value)) continue;
      ASSERT_EQ(fp8_bits(value, format), code);
      ASSERT_EQ(rounded_to_fp8(value, format), value);
    }
}

// Finite codes above zero, in the order of their numbers.
std::vector<float> numbers_of(Fp8 format) {
  std::vector<float> all;
  for (int code = 0; code < 0x80; ++code)
    if (const double x = meaning(code, format); std::isfinite(x)) all.push_back(static_cast<float>(x));
  return all;
}

// Between two neighbours the nearer wins, and in the middle the even code; as f32 and bf16 see what is beside
// it.
TEST(Fp8, RoundsToTheNearestEven) {
  for (const Fp8 format : formats) {
    const std::vector<float> all = numbers_of(format);
    ASSERT_TRUE(std::is_sorted(all.begin(), all.end()));
    for (std::size_t i = 0; i + 1 < all.size(); ++i) {
      const float middle = all[i] + (all[i + 1] - all[i]) / 2, even = all[i % 2 == 0 ? i : i + 1];
      const float below = std::nextafter(middle, 0.0f), above = std::nextafter(middle, infinity);
      for (const float sign : {1.0f, -1.0f}) {
        ASSERT_EQ(rounded_to_fp8(sign * middle, format), sign * even) << i;
        ASSERT_EQ(rounded_to_fp8(sign * below, format), sign * all[i]) << i;
        ASSERT_EQ(rounded_to_fp8(sign * above, format), sign * all[i + 1]) << i;
      }
      ASSERT_EQ(float{bf16(middle)}, middle) << "middles are bf16";
      const auto bits = bf16(middle).bits;
      ASSERT_EQ(rounded_to_fp8(bf16::of_bits(static_cast<std::uint16_t>(bits - 1)), format), all[i]) << i;
      ASSERT_EQ(rounded_to_fp8(bf16::of_bits(static_cast<std::uint16_t>(bits + 1)), format), all[i + 1]) << i;
    }
  }
}

// Every bf16 there is: the code is the nearest number's, within what is promised.
TEST(Fp8, EveryBf16IsRoundedToTheNearest) {
  for (const Fp8 format : formats) {
    const std::vector<float> all = numbers_of(format);
    const double unit = format == Fp8::e4m3 ? 0x1p-4 : 0x1p-3,
                 least_normal = format == Fp8::e4m3 ? 0x1p-6 : 0x1p-14;
    for (std::uint32_t pattern = 0; pattern <= 0xffff; ++pattern) {
      const float x = bf16::of_bits(static_cast<std::uint16_t>(pattern));
      const float rounded = rounded_to_fp8(x, format);
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(rounded));
        ASSERT_EQ(fp8_bits(x, format), 0x7f);
        continue;
      }
      ASSERT_EQ(std::signbit(rounded), std::signbit(x));
      ASSERT_EQ(fp8_value(fp8_bits(x, format), format), rounded);
      const float size = std::fabs(x);
      if (size >= all.back()) {
        ASSERT_EQ(std::fabs(rounded), all.back()) << "saturates, infinity too";
        continue;
      }
      const auto next = std::upper_bound(all.begin(), all.end(), size);
      const double up = *next - double{size}, down = double{size} - *(next - 1);
      const double off = std::fabs(std::fabs(double{rounded}) - size);
      ASSERT_EQ(off, std::min(up, down)) << x;
      ASSERT_LE(off, size >= least_normal ? unit * size : unit * least_normal) << x;
    }
  }
}

// The largest number becomes one of the upper half of those of the format, and loses nothing to its factor.
TEST(Fp8, ScalesUseTheWholeRange) {
  for (const Fp8 format : formats) {
    const float most = shape_of(format).largest;
    for (std::uint32_t pattern = 1; pattern < 0x7f80; ++pattern) {
      const float largest = bf16::of_bits(static_cast<std::uint16_t>(pattern)),
                  scale = fp8_scale(largest, format);
      int exponent = 0;
      ASSERT_EQ(std::frexp(scale, &exponent), 0.5f) << "a power of two";
      ASSERT_LE(largest * scale, most);
      ASSERT_TRUE(2 * largest * scale > most || scale == 0x1p100f) << largest;
      const float rounded = rounded_to_fp8(largest * scale, format) / scale;
      ASSERT_EQ(float{bf16(rounded)}, rounded);
    }
    EXPECT_EQ(0 * fp8_scale(0, format), 0);
    EXPECT_TRUE(std::isnan(fp8_scale(infinity, format)));
    EXPECT_TRUE(std::isnan(fp8_scale(std::nanf(""), format)));
  }
}

}  // namespace
}  // namespace echelon::fp8_test
