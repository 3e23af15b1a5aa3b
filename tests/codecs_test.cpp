#include "tensor/codecs.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/philox.h"

namespace echelon::codecs_test {
namespace {

template <class F>
class CodecsOf : public testing::Test {};
using Floats = testing::Types<float, double>;
TYPED_TEST_SUITE(CodecsOf, Floats);

template <class F>
F bf16(F x) {
  std::vector<std::byte> packed(2);
  encode_bf16(&x, 1, packed.data());
  decode_bf16(packed.data(), 1, false, &x);
  return x;
}

template <class F>
F fp16(F x, float scale) {
  std::vector<std::byte> packed(2);
  encode_fp16(&x, 1, scale, packed.data());
  decode_fp16(packed.data(), 1, scale, false, &x);
  return x;
}

double uniform(std::uint64_t i) { return Philox(1, Stream::test, 77).uniform(i); }

// Random signs and fractions, exponents from `low` to `high`.
template <class F>
std::vector<F> spread(std::int64_t n, int low, int high, std::uint64_t which) {
  const Philox random(2, Stream::test, which);
  std::vector<F> x;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::uint64_t>(2 * i);
    const int exponent = low + static_cast<int>(random.below(at, static_cast<std::uint64_t>(high - low + 1)));
    const double fraction = 1 + random.uniform(at + 1);
    x.push_back(static_cast<F>(std::ldexp(random.words(at)[3] % 2 == 0 ? fraction : -fraction, exponent)));
  }
  return x;
}

// `form` rounds to the values v(0) < v(1) < ... of consecutive bit patterns: each is kept, and between two of
// them the nearer wins, the even pattern in the middle.
template <class F, class Value, class Form>
void expect_nearest_even(std::uint32_t first, std::uint32_t last, const Value& value, const Form& form) {
  for (std::uint32_t bits = first; bits < last; ++bits) {
    const auto low = static_cast<double>(value(bits)), high = static_cast<double>(value(bits + 1));
    const double middle = low + (high - low) / 2, even = bits % 2 == 0 ? low : high;
    const auto away = static_cast<F>(std::numeric_limits<double>::infinity());
    ASSERT_EQ(form(static_cast<F>(low)), low) << bits;
    ASSERT_EQ(form(static_cast<F>(-low)), -low) << bits;
    ASSERT_EQ(form(static_cast<F>(middle)), even) << bits;
    ASSERT_EQ(form(static_cast<F>(-middle)), -even) << bits;
    ASSERT_EQ(form(std::nextafter(static_cast<F>(middle), F(0))), low) << bits;
    ASSERT_EQ(form(std::nextafter(static_cast<F>(middle), away)), high) << bits;
  }
}

TYPED_TEST(CodecsOf, Bf16RoundsToTheNearestEven) {
  const auto value = [](std::uint32_t bits) { return std::bit_cast<float>(bits << 16); };
  expect_nearest_even<TypeParam>(0, 0x7f7f, value, [](TypeParam x) { return bf16(x); });
}

TYPED_TEST(CodecsOf, Bf16ErrorIsWithinItsBound) {
  for (TypeParam x : spread<TypeParam>(20000, -126, 126, 1))
    ASSERT_LE(std::abs(bf16(x) - x), 0x1p-8 * std::abs(x)) << x;
  for (TypeParam x : spread<TypeParam>(2000, -149, -127, 2)) ASSERT_LE(std::abs(bf16(x) - x), 0x1p-134) << x;
}

TEST(Codecs, Bf16KeepsWhatIsNotFiniteAndInventsNone) {
  const float largest = std::bit_cast<float>(0x7f7f0000u), infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()), largest);
  EXPECT_EQ(bf16(-std::numeric_limits<float>::max()), -largest);
  EXPECT_EQ(bf16(infinity), infinity);
  EXPECT_EQ(bf16(-infinity), -infinity);
  EXPECT_TRUE(std::isnan(bf16(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(bf16(std::bit_cast<float>(0x7f800001u))));  // its payload is in the lower half
  EXPECT_EQ(bf16(1e300), std::numeric_limits<double>::infinity());
  EXPECT_EQ(bf16(-1e300), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(bf16(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_EQ(bf16(1e-300), 0);
}

TYPED_TEST(CodecsOf, Fp16RoundsToTheNearestEven) {
  const auto value = [](std::uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 10);
    const double fraction = static_cast<double>(bits & 1023u) / 1024;
    return exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
  };
  for (float scale : {1.0f, 0x1p-126f, 0x1p100f})
    expect_nearest_even<TypeParam>(
        scale < 1 ? 0x4000 : 0, 0x7800,  // where the product with 2^-126 is no subnormal f32
        [&](std::uint32_t bits) { return value(bits) * static_cast<double>(scale); },
        [&](TypeParam x) { return fp16(x, scale); });
}

TYPED_TEST(CodecsOf, Fp16ErrorIsWithinItsBoundWhateverTheMagnitudes) {
  for (int top : {-120, -60, 0, 60, 120}) {
    const auto x = spread<TypeParam>(4000, std::max(top - 50, -120), top, 3);
    const auto m = static_cast<double>(largest_magnitude(x.data(), 4000));
    const float scale = fp16_scale(m);
    for (TypeParam element : x) {
      const double exact = static_cast<double>(element);
      const double bound = std::max({0x1p-11 * std::abs(exact), 0x1p-39 * m, 0x1p-149});
      ASSERT_LE(std::abs(static_cast<double>(fp16(element, scale)) - exact), bound) << element;
    }
  }
}

TYPED_TEST(CodecsOf, Int8IsWithinOneScaleAndUnbiased) {
  constexpr std::int64_t n = 61, draws = 20000;
  for (double magnitude : {1e-30, 1.0, 1e30}) {
    std::vector<TypeParam> x;
    for (std::uint64_t i = 0; i < n; ++i)
      x.push_back(static_cast<TypeParam>(magnitude * (2 * uniform(i) - 1)));
    x[7] = 0;
    const float scale = int8_scale(static_cast<double>(largest_magnitude(x.data(), n)));
    const double s = static_cast<double>(scale);
    std::vector<double> mean(n);
    std::vector<std::byte> packed(n);
    std::vector<std::uint32_t> random(n);
    std::vector<TypeParam> y(n);
    const Philox words(3, Stream::test, 5);
    for (std::uint64_t draw = 0; draw < draws; ++draw) {
      words.fill_words(draw * n, n, random.data());
      encode_int8(x.data(), n, scale, random.data(), packed.data());
      decode_int8(packed.data(), n, scale, false, y.data());
      for (std::size_t i = 0; i < n; ++i) {
        const double error = static_cast<double>(y[i]) - static_cast<double>(x[i]);
        ASSERT_LE(std::abs(error), s * (1 + 0x1p-16)) << i;
        mean[i] += error / draws;
      }
    }
    // A draw that is up with probability f has variance f (1 - f) <= 1/4 scale^2; five standard deviations.
    for (std::size_t i = 0; i < n; ++i)
      EXPECT_LE(std::abs(mean[i]), s * (5 * 0.5 / std::sqrt(double{draws}) + 0x1p-16)) << i;
    EXPECT_EQ(mean[7], 0);
  }
}

TYPED_TEST(CodecsOf, Int8HoldsItsLargestElementHoweverItRounds) {
  for (TypeParam m : spread<TypeParam>(5000, -120, 126, 9))
    for (std::uint32_t random : {0u, 0xffffffffu}) {
      const float scale = int8_scale(static_cast<double>(std::abs(m)));
      std::byte packed;
      encode_int8(&m, 1, scale, &random, &packed);
      TypeParam back;
      decode_int8(&packed, 1, scale, false, &back);
      ASSERT_LE(std::abs(back - m), static_cast<TypeParam>(scale)) << m;  // 128 would come back as -128
    }
}

TYPED_TEST(CodecsOf, ABlockWithABadElementIsBad) {
  using F = TypeParam;
  const F infinity = std::numeric_limits<F>::infinity();
  for (F bad : {infinity, -infinity, std::numeric_limits<F>::quiet_NaN()}) {
    const std::vector<F> x{1, bad, 2};
    const auto m = static_cast<double>(largest_magnitude(x.data(), 3));
    std::vector<std::byte> packed(6);
    std::vector<F> y(3);
    encode_fp16(x.data(), 3, fp16_scale(m), packed.data());
    decode_fp16(packed.data(), 3, fp16_scale(m), false, y.data());
    for (F value : y) EXPECT_FALSE(std::isfinite(value));
    const std::vector<std::uint32_t> random(3);
    encode_int8(x.data(), 3, int8_scale(m), random.data(), packed.data());
    decode_int8(packed.data(), 3, int8_scale(m), false, y.data());
    for (F value : y) EXPECT_FALSE(std::isfinite(value));
  }
}

TEST(Codecs, ScalesOfTheEndsOfTheRange) {
  EXPECT_FALSE(std::isfinite(fp16_scale(0x1p142)));
  EXPECT_EQ(fp16_scale(0x1p141), 0x1p127f);
  EXPECT_EQ(fp16_scale(0), 0x1p-126f);
  EXPECT_EQ(fp16_scale(1e-45), 0x1p-126f);
  EXPECT_FALSE(std::isfinite(int8_scale(1e39)));
  EXPECT_EQ(int8_scale(0), std::numeric_limits<float>::min());
  EXPECT_TRUE(std::isfinite(127 * int8_scale(static_cast<double>(std::numeric_limits<float>::max()) / 2)));
}

TYPED_TEST(CodecsOf, LargestMagnitudeSeesSignsAndNan) {
  using F = TypeParam;
  std::vector<F> x(37, F(0.5));
  x[36] = -3;
  EXPECT_EQ(largest_magnitude(x.data(), 37), 3);
  EXPECT_EQ(largest_magnitude(x.data(), 36), F(0.5));
  EXPECT_EQ(largest_magnitude(x.data(), 0), 0);
  x[5] = -std::numeric_limits<F>::infinity();
  EXPECT_EQ(largest_magnitude(x.data(), 37), std::numeric_limits<F>::infinity());
  x[20] = -std::numeric_limits<F>::quiet_NaN();
  EXPECT_TRUE(std::isnan(largest_magnitude(x.data(), 37)));
}

TYPED_TEST(CodecsOf, DecodingAddsWhereAsked) {
  using F = TypeParam;
  const std::vector<F> x{1, -2, 3};
  std::vector<std::byte> packed(7);
  std::byte* const odd = packed.data() + 1;  // no alignment is needed
  std::vector<F> y{10, 20, 30};
  encode_bf16(x.data(), 3, odd);
  decode_bf16(odd, 3, true, y.data());
  EXPECT_EQ(y, (std::vector<F>{11, 18, 33}));
  encode_fp16(x.data(), 3, 1.0f, odd);
  decode_fp16(odd, 3, 1.0f, true, y.data());
  EXPECT_EQ(y, (std::vector<F>{12, 16, 36}));
  const std::vector<std::uint32_t> random(3);
  encode_int8(x.data(), 3, 0.5f, random.data(), odd);
  decode_int8(odd, 3, 0.5f, true, y.data());
  EXPECT_EQ(y, (std::vector<F>{13, 14, 39}));
}

}  // namespace
}  // namespace echelon::codecs_test
