#include "base/bf16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace echelon::bf16_test {
namespace {

bf16 pattern(std::uint32_t bits) { return bf16::of_bits(static_cast<std::uint16_t>(bits)); }

TEST(Bf16, EveryPatternIsItselfAgain) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const bf16 x = pattern(bits);
    const float wide = x;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide), bits << 16);
    const bool nan = (bits & 0x7fff) > 0x7f80;
    ASSERT_EQ(std::isnan(wide), nan);
    // A signalling NaN becomes a quiet one of the same sign.
    ASSERT_EQ(bf16(wide).bits, nan ? bits | 0x40 : bits);
    if (!nan) {
      ASSERT_EQ(bf16(static_cast<double>(wide)).bits, bits);
    }
  }
}

// Between two neighbours the nearer wins, and the even pattern in the middle; from f64 too, where a number
// beside the middle is nearer to it than f32 can tell.
template <class F>
void expect_nearest_even() {
  const auto away = std::numeric_limits<F>::infinity();
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const F low = static_cast<float>(pattern(bits));
    // What comes after the largest number, for rounding: the next power of two, which is infinite.
    const F high =
        bits == 0x7f7f ? F(0x1p127) * (sizeof(F) == 4 ? 1 : 2) : static_cast<float>(pattern(bits + 1));
    const F middle = bits == 0x7f7f ? F(0x1.ffp127) : low + (high - low) / 2;
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(bf16(middle).bits, even) << bits;
    ASSERT_EQ(bf16(-middle).bits, even | 0x8000) << bits;
    ASSERT_EQ(bf16(std::nextafter(middle, F(0))).bits, bits) << bits;
    ASSERT_EQ(bf16(std::nextafter(middle, away)).bits, bits + 1) << bits;
    ASSERT_EQ(bf16(std::nextafter(-middle, -away)).bits, (bits + 1) | 0x8000) << bits;
  }
}
TEST(Bf16, RoundsToTheNearestEven) {
  expect_nearest_even<float>();
  expect_nearest_even<double>();
}

TEST(Bf16, WhatIsNotFiniteStaysSo) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(bf16(infinity).bits, 0x7f80);
  EXPECT_EQ(bf16(-infinity).bits, 0xff80);
  EXPECT_EQ(bf16(1e300).bits, 0x7f80);
  EXPECT_TRUE(
      std::isnan(float{bf16(std::bit_cast<float>(0x7f800001u))}));  // its payload is in the lower half
  EXPECT_TRUE(std::isnan(float{bf16(std::bit_cast<float>(0xffffffffu))}));
  EXPECT_TRUE(std::isnan(float{bf16(std::numeric_limits<double>::quiet_NaN())}));
  EXPECT_EQ(bf16(1e-300).bits, 0);
  EXPECT_EQ(bf16(-1e-300).bits, 0x8000);
}

TEST(Bf16, LimitsAreThoseOfTheFormat) {
  using Limits = std::numeric_limits<bf16>;
  EXPECT_EQ(Limits::epsilon(), 0x1p-7f);
  EXPECT_EQ(Limits::min(), 0x1p-126f);
  EXPECT_EQ(Limits::max(), 0x1.fep127f);
  EXPECT_EQ(Limits::lowest(), -0x1.fep127f);
  EXPECT_EQ(Limits::infinity(), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(float{Limits::quiet_NaN()}));
}

// Of the 65536 random numbers just as many round away from zero as the number is 65536ths of the way there:
// the mean is the number itself.
TEST(Bf16, StochasticRoundingIsExactOnAverage) {
  for (std::uint32_t bits : {0x3f800000u, 0x3f800001u, 0x3f808000u, 0x3f80ffffu, 0xbf812345u, 0x00004000u,
                             0x8000ffffu, 0x3fffc000u, 0x7f7e8001u}) {
    const auto x = std::bit_cast<float>(bits);
    const auto down = static_cast<std::uint16_t>(bits >> 16);
    std::uint32_t ups = 0;
    for (std::uint32_t random = 0; random <= 0xffff; ++random) {
      const bf16 rounded = bf16::stochastic(x, static_cast<std::uint16_t>(random));
      if (rounded.bits == down) continue;
      ASSERT_EQ(rounded.bits, down + 1);
      ++ups;
    }
    EXPECT_EQ(ups, bits & 0xffff) << x;
  }
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(bf16::stochastic(infinity, 0xffff).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(float{bf16::stochastic(std::bit_cast<float>(0x7f800001u), 0)}));
}

}  // namespace
}  // namespace echelon::bf16_test
