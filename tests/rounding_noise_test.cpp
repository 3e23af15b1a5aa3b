#include "tensor/rounding_noise.h"

#include <gtest/gtest.h>

#include <cmath>

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
  RoundingNoise noise{*exact, arena};
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
