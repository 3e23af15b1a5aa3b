#include "tensor/rounding_noise.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tensor/host.h"
#include "tensor_checks.h"

namespace echelon::rounding_noise_test {
namespace {

using namespace checks;

struct RoundingNoiseTest : testing::Test {
  // (1, 2) times (2, 1)
  double product(std::vector<double> a, std::vector<double> b) {
    const Tensor x = constant(arena, {1, 2}, 0), y = constant(arena, {2, 1}, 0),
                 z = constant(arena, {1, 1}, 0);
    std::copy(a.begin(), a.end(), x.host<double>());
    std::copy(b.begin(), b.end(), y.host<double>());
    noise.matmul(x, Transpose::no, y, Transpose::no, z, false);
    EXPECT_EQ(x.host<double>()[0], a[0]);  // operands stay
    return *z.host<double>();
  }
  Arena arena;
  std::unique_ptr<Kernels> exact = make_reference_kernels();
  std::shared_ptr<RoundingNoise> made = make_rounding_noise(*exact, arena);
  RoundingNoise& noise = *made;
};

TEST_F(RoundingNoiseTest, IsNoneUntilItBegins) {
  EXPECT_EQ(product({3, 0.1}, {1.0 / 3, 7}), 3 * (1.0 / 3) + 0.1 * 7);
  noise.begin(1);
  noise.end();
  EXPECT_EQ(product({1e8, -1e8}, {1, 1}), 0);
}

TEST_F(RoundingNoiseTest, IsAsLargeAsTheTermsOfASum) {
  double most = 0, least = 1;
  for (std::uint64_t trial = 0; trial < 40; ++trial) {
    noise.begin(trial);
    const double cancelled = std::abs(product({1e8, -1e8}, {1, 1}));
    EXPECT_LE(cancelled, 8 * 1e8 * epsilon);
    most = std::max(most, cancelled);
    const double sum = product({1, 1}, {1, 1});
    EXPECT_NEAR(sum, 2, 8 * epsilon);
    least = std::min(least, sum - 2);
    EXPECT_EQ(product({0, 0}, {1, 1}), 0);
  }
  EXPECT_GE(most, 1e8 * epsilon);
  EXPECT_LT(least, 0);
}

// A unit of bf16 for each operand and for the result, however long the sum; an f32 result by its own.
TEST_F(RoundingNoiseTest, IsOfTheTypeThatNumbersAreKeptIn) {
  constexpr std::int64_t terms = 4096;
  const double narrow = 0x1p-7, wide = 0x1p-23;
  for (DType of_result : {DType::bf16, DType::f32}) {
    const Tensor a(arena, MemoryCategory::other, DType::bf16, {1, terms}),
        b = a.reshape({terms, 1}), c(arena, MemoryCategory::other, of_result, {1, 1}),
        x(arena, MemoryCategory::other, of_result, {1, 1});
    exact->fill(a, 0);
    exact->fill(a.column_range(7, 8), 1);
    exact->fill(x, 1);
    double most = 0;
    for (std::uint64_t trial = 0; trial < 40; ++trial) {
      noise.begin(trial);
      noise.matmul(a, Transpose::no, b, Transpose::no, c, false);
      const double off = std::abs(copy_numbers_to_host(c)[0] - 1);
      EXPECT_LE(off, 4 * narrow);
      most = std::max(most, off);
      const Tensor y(arena, MemoryCategory::other, of_result, {1, 1});
      noise.residual(x, x, Tensor(), y);
      EXPECT_LE(std::abs(copy_numbers_to_host(y)[0] - 2), (of_result == DType::bf16 ? narrow : wide) * 6);
    }
    EXPECT_GE(most, narrow);
  }
}

TEST_F(RoundingNoiseTest, IsTheSameForTheSameTrial) {
  const auto trial = [&](std::uint64_t number) {
    noise.begin(number);
    std::vector<double> results;
    for (int i = 0; i < 20; ++i) results.push_back(product({1e8, -1e8}, {1, 1}));
    return results;
  };
  EXPECT_EQ(trial(3), trial(3));
  EXPECT_NE(trial(3), trial(4));
}

}  // namespace
}  // namespace echelon::rounding_noise_test
