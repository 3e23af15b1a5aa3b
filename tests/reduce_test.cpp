#include "comm/reduce.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace echelon::reduce_test {
namespace {

// Both signs, with exponents so far apart that hardly any sum is exact.
template <class T>
std::vector<T> wide(std::mt19937& random, std::size_t count) {
  std::vector<T> data(count);
  for (T& x : data) {
    if constexpr (std::is_integral_v<T>) {
      x = static_cast<T>(random());
    } else {
      x = T(std::ldexp(static_cast<Wide<T>>(random()) + 1, static_cast<int>(random() % 40) - 40));
      if (random() % 2 == 0) x = T(-x);
    }
  }
  return data;
}

template <class T>
std::vector<std::vector<T>> wide_sources(int n, std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<std::vector<T>> sources;
  for (int k = 0; k < n; ++k) sources.push_back(wide<T>(random, count));
  return sources;
}

template <class T>
std::vector<T> reduce(ReduceOp op, const std::vector<std::vector<T>>& sources) {
  std::vector<const std::byte*> from;
  for (const auto& source : sources) from.push_back(reinterpret_cast<const std::byte*>(source.data()));
  std::vector<T> result(sources[0].size());
  const std::array<std::byte*, 1> to{reinterpret_cast<std::byte*>(result.data())};
  reduce_elements(op, dtype_of<T>, from, 0, to, 0, static_cast<std::int64_t>(result.size()));
  return result;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
class ReduceOf : public testing::Test {};
using Types = testing::Types<float, double, bf16, std::int32_t>;
TYPED_TEST_SUITE(ReduceOf, Types);

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
  else
    return a + b;
}
template <class T>
Wide<T> sum_by_halves(const std::vector<std::vector<T>>& sources, std::size_t begin, std::size_t end,
                      std::size_t i) {
  if (end - begin == 1) return sources[begin][i];
  const std::size_t middle = begin + (end - begin + 1) / 2;
  return add(sum_by_halves(sources, begin, middle, i), sum_by_halves(sources, middle, end, i));
}

TYPED_TEST(ReduceOf, SumsAreGroupedByHalves) {
  using T = TypeParam;
  for (int n = 1; n <= 37; ++n)
    for (std::size_t count : {1U, 15U, 64U, 67U, 1024U, 2503U}) {
      const auto sources = wide_sources<T>(n, count);
      std::vector<T> expected(count);
      for (std::size_t i = 0; i < count; ++i) expected[i] = T(sum_by_halves(sources, 0, sources.size(), i));
      ASSERT_TRUE(same_bits(reduce(ReduceOp::sum, sources), expected)) << n << " sources of " << count;
    }
}

TYPED_TEST(ReduceOf, GroupsThenAcrossGroupsIsTheFlatSum) {
  using T = TypeParam;
  for (int group : {1, 2, 3, 5, 7, 8, 12})
    for (int groups : {1, 2, 4, 8}) {
      const auto sources = wide_sources<T>(group * groups, 1500);
      std::vector<std::vector<T>> sums;
      for (int g = 0; g < groups; ++g)
        sums.push_back(reduce(ReduceOp::sum, std::vector<std::vector<T>>(sources.begin() + g * group,
                                                                         sources.begin() + (g + 1) * group)));
      const auto flat = reduce(ReduceOp::sum, sources), across = reduce(ReduceOp::sum, sums);
      if constexpr (std::is_same_v<T, bf16>) {
        // Each is rounded once, and the former's groups before.
        for (std::size_t i = 0; i < flat.size(); ++i) {
          float size = 0;
          for (const auto& source : sources) size += std::abs(float{source[i]});
          ASSERT_LE(std::abs(flat[i] - across[i]), 3 * 0x1p-8f * (1 + 0x1p-7f) * size)
              << groups << " groups of " << group;
        }
      } else {
        ASSERT_TRUE(same_bits(across, flat)) << groups << " groups of " << group;
      }
    }
}

// Halves that bf16 cannot hold: rounded on the way, or added up in bf16, they come out as nothing.
TEST(Reduce, Bf16IsRoundedOnceHoweverManyAreSummed) {
  for (std::size_t n : {4U, 16U, 64U, 256U}) {
    std::vector<std::vector<bf16>> sources(n, std::vector<bf16>(70, bf16(0x1p-9f)));
    for (std::size_t k = 0; k < n; k += 2) sources[k].assign(70, bf16(k < n / 2 ? 1.0f : -1.0f));
    const auto sum = reduce(ReduceOp::sum, sources);
    for (bf16 x : sum) ASSERT_EQ(x, static_cast<float>(n / 2) * 0x1p-9f) << n;
  }
}

// What makes the two tests above mean something: these values do show how a sum was grouped.
TEST(Reduce, AnotherGroupingHasOtherBits) {
  const auto sources = wide_sources<float>(4, 1500);
  std::vector<float> from_the_left = sources[0];
  for (std::size_t k = 1; k < 4; ++k)
    for (std::size_t i = 0; i < from_the_left.size(); ++i) from_the_left[i] += sources[k][i];
  EXPECT_FALSE(same_bits(reduce(ReduceOp::sum, sources), from_the_left));
}

TYPED_TEST(ReduceOf, SourcesMayBeDestinationsAtOffsets) {
  using T = TypeParam;
  for (int n : {2, 3, 4, 8, 9, 20}) {
    constexpr std::int64_t count = 1237, from = 5;
    auto sources = wide_sources<T>(n, count + from);
    const auto expected = reduce(ReduceOp::sum, sources);
    const auto before = sources;
    std::vector<const std::byte*> in;
    std::vector<std::byte*> out;
    for (auto& source : sources) {
      in.push_back(reinterpret_cast<const std::byte*>(source.data()));
      out.push_back(reinterpret_cast<std::byte*>(source.data()));
    }
    std::vector<T> apart(count + from, T(7.0f));
    out.push_back(reinterpret_cast<std::byte*>(apart.data()));
    reduce_elements(ReduceOp::sum, dtype_of<T>, in, from, out, from, count);
    for (int k = 0; k < n; ++k) {
      const auto& x = sources[static_cast<std::size_t>(k)];
      const auto& old = before[static_cast<std::size_t>(k)];
      ASSERT_TRUE(std::equal(x.begin() + from, x.end(), expected.begin() + from)) << n;
      ASSERT_TRUE(std::equal(x.begin(), x.begin() + from, old.begin())) << n;
    }
    ASSERT_TRUE(std::equal(apart.begin() + from, apart.end(), expected.begin() + from)) << n;
    ASSERT_EQ(apart[from - 1], T(7.0f));
  }
}

TYPED_TEST(ReduceOf, MaxIsTheLargestOrNan) {
  using T = TypeParam;
  for (int n : {1, 2, 3, 6, 8, 9, 17}) {
    auto sources = wide_sources<T>(n, 1100);
    auto& last = sources[static_cast<std::size_t>(n / 2)];
    if constexpr (!std::is_integral_v<T>) last[3] = std::numeric_limits<T>::quiet_NaN();
    const auto result = reduce(ReduceOp::max, sources);
    for (std::size_t i = 0; i < result.size(); ++i) {
      T expected = sources[0][i];
      for (const auto& source : sources) expected = std::max(expected, source[i]);
      if (!std::is_integral_v<T> && i == 3)
        ASSERT_NE(result[i], result[i]);
      else
        ASSERT_EQ(result[i], expected) << n;
    }
  }
}

}  // namespace
}  // namespace echelon::reduce_test
