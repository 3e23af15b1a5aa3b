#include "base/split_weight.h"

#include <gtest/gtest.h>

#include "split_weight_checks.h"

namespace echelon::split_weight_test {
namespace {

// Where rounding changes its mind, behind every upper half; split_weight_slow has the other bits.
TEST(SplitWeight, ComesBackFromTheNearestValueAndWhatThatIsRoundedOffBy) {
  for (std::uint32_t upper = 0; upper <= 0xffff; ++upper)
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      ASSERT_EQ(wrong_split(upper << 16 | lower), nullptr) << std::hex << upper << " " << lower;
}

// The weights that are nearest to a value are no other's: 65536 remainders each, none twice.
TEST(SplitWeight, HasSixteenBitsForEachValue) {
  const bf16 one(1.0f);
  float before = SplitWeight(one, -0x8000).joined();
  EXPECT_EQ(before, 1 - 0x1p-9f);  // half of the way to the value below, which is the half as far away
  for (std::int32_t remainder = -0x7fff; remainder <= 0x7fff; ++remainder) {
    const float weight = SplitWeight(one, static_cast<std::int16_t>(remainder)).joined();
    ASSERT_GT(weight, before);
    ASSERT_EQ(SplitWeight(weight).value.bits, one.bits);
    before = weight;
  }
}

TEST(SplitWeight, OfWhatIsNotANumberIsNotANumber) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7f808000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    const SplitWeight split(std::bit_cast<float>(bits));
    EXPECT_TRUE(std::isnan(static_cast<float>(split.value))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(split.joined())) << std::hex << bits;
    EXPECT_EQ(std::signbit(split.joined()), std::signbit(std::bit_cast<float>(bits)));
  }
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(static_cast<float>(SplitWeight(-infinity).value), -infinity);
  // As rounding to even has it: half a unit above the largest bfloat16 is nearer to 2^128.
  EXPECT_EQ(static_cast<float>(SplitWeight(std::numeric_limits<float>::max()).value), infinity);
}

}  // namespace
}  // namespace echelon::split_weight_test
