#include "tensor/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/philox.h"

namespace echelon::top_k_test {
namespace {

template <class F>
class TopKOf : public testing::Test {};
using Floats = testing::Types<float, double>;
TYPED_TEST_SUITE(TopKOf, Floats);

// What take_largest() must do, by sorting.
template <class F>
void expect_taken(const std::vector<F>& before, std::int64_t k) {
  const auto n = static_cast<std::int64_t>(before.size());
  const auto magnitude = [&](std::int32_t i) {
    const F x = std::abs(before[static_cast<std::size_t>(i)]);
    return std::isnan(x) ? std::numeric_limits<F>::infinity() : x;
  };
  std::vector<std::int32_t> order(before.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return magnitude(a) > magnitude(b); });
  order.resize(static_cast<std::size_t>(k));
  std::sort(order.begin(), order.end());

  std::vector<F> x = before, values(static_cast<std::size_t>(k));
  std::vector<std::int32_t> indices(values.size());
  take_largest(x.data(), n, k, 1000, values.data(), indices.data());
  std::vector<F> rest = before;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<std::size_t>(order[i]);
    ASSERT_EQ(indices[i], 1000 + order[i]);
    // Bits, as NaN is not equal to itself.
    ASSERT_EQ(0, std::memcmp(&values[i], &before[at], sizeof(F)));
    rest[at] = 0;
  }
  ASSERT_EQ(0, std::memcmp(x.data(), rest.data(), x.size() * sizeof(F)));
}

TYPED_TEST(TopKOf, TakesTheLargestAndOfEqualOnesTheFirst) {
  using F = TypeParam;
  const Philox random(11, Stream::test, 0);
  for (std::int64_t n : {1, 2, 17, 300, 5000})
    for (std::uint64_t distinct : {1, 3, 50, 1 << 30}) {
      std::vector<F> x;
      for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(n); ++i) {
        const auto level = static_cast<F>(random.below(i, distinct));
        x.push_back((random.words(i)[3] % 2 == 0 ? level : -level) * F(1e-3));
      }
      for (std::int64_t k : {std::int64_t{1}, (n + 1) / 2, n}) expect_taken(x, k);
    }
}

TYPED_TEST(TopKOf, OrdersEveryMagnitude) {
  using F = TypeParam;
  using Limits = std::numeric_limits<F>;
  // Neighbours in every digit of the bits, and the ends of the range.
  std::vector<F> x{0, -F(0), Limits::denorm_min(), -Limits::min(), Limits::max(), -Limits::infinity(), 1};
  for (F base : {F(1), F(1e-30), F(1e30), F(3.14159)}) {
    x.push_back(std::nextafter(base, F(0)));
    x.push_back(-base);
    x.push_back(std::nextafter(base, Limits::infinity()));
  }
  for (std::int64_t k = 1; k <= static_cast<std::int64_t>(x.size()); ++k) expect_taken(x, k);
}

TYPED_TEST(TopKOf, ANanIsTakenFirst) {
  using F = TypeParam;
  std::vector<F> x{5, std::numeric_limits<F>::infinity(), -std::numeric_limits<F>::quiet_NaN(), 7};
  F value;
  std::int32_t index;
  take_largest(x.data(), 4, 1, 0, &value, &index);
  EXPECT_EQ(index, 2);
  EXPECT_TRUE(std::isnan(value));
}

TEST(TopK, RefusesWhatCannotBe) {
  float x = 1, value;
  std::int32_t index;
  EXPECT_THROW(take_largest(&x, 1, 0, 0, &value, &index), InvariantError);
  EXPECT_THROW(take_largest(&x, 1, 2, 0, &value, &index), InvariantError);
  EXPECT_THROW(take_largest(&x, 1, 1, std::int64_t{1} << 31, &value, &index), InvariantError);
}

}  // namespace
}  // namespace echelon::top_k_test
