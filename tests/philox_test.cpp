#include "base/philox.h"

#include <Random123/philox.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "base/split.h"

namespace echelon::philox_test {
namespace {

using Words = std::array<std::uint32_t, 4>;

struct KnownAnswer {
  Words counter;
  std::array<std::uint32_t, 2> key;
  Words expected;
};

// The rows "philox4x32 10" of kat_vectors in the Random123 distribution.
const std::array<KnownAnswer, 3> known_answers{{
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
}};

TEST(Philox, HeaderGivesThePublishedWords) {
  for (const KnownAnswer& known : known_answers) {
    r123::Philox4x32::ctr_type counter{};
    for (unsigned i = 0; i < 4; ++i) counter[i] = known.counter[i];
    r123::Philox4x32::key_type key{};
    for (unsigned i = 0; i < 2; ++i) key[i] = known.key[i];
    const auto block = r123::Philox4x32{}(counter, key);
    for (unsigned i = 0; i < 4; ++i) EXPECT_EQ(block[i], known.expected[i]);
  }
}

// Pins how seed, stream, substream and index become key and counter: another mapping would change every
// initial value and every data order.
TEST(Philox, ClassGivesThePublishedWords) {
  for (const KnownAnswer& known : known_answers) {
    const std::uint32_t stream_word = 4u * 0x9E3779B9u;  // Stream::test
    const std::uint64_t seed = std::uint64_t{known.key[1] ^ stream_word} << 32 | known.key[0];
    const std::uint64_t substream = std::uint64_t{known.counter[3]} << 32 | known.counter[2];
    const std::uint64_t index = std::uint64_t{known.counter[1]} << 32 | known.counter[0];
    EXPECT_EQ(Philox(seed, Stream::test, substream).words(index), known.expected);
  }
}

TEST(Philox, EveryArgumentMatters) {
  std::set<Words> seen;
  for (std::uint64_t seed : {0ull, 1ull, 1ull << 32, 1ull << 63})
    for (Stream stream : {Stream::initial_value, Stream::data_order, Stream::sampling, Stream::test})
      for (std::uint64_t substream : {0ull, 1ull, 1ull << 40})
        for (std::uint64_t index : {0ull, 1ull, 2ull, 1ull << 33}) {
          const Philox numbers(seed, stream, substream);
          EXPECT_EQ(numbers.words(index), Philox(seed, stream, substream).words(index));
          seen.insert(numbers.words(index));
        }
  EXPECT_EQ(seen.size(), 4u * 4u * 3u * 4u);
}

TEST(Philox, UniformCoversTheUnitIntervalEvenly) {
  const Philox numbers(1, Stream::test, 0);
  constexpr int count = 40000, bins = 20;
  std::array<int, bins> hits{};
  for (std::uint64_t i = 0; i < count; ++i) {
    const double u = numbers.uniform(i);
    ASSERT_TRUE(0 <= u && u < 1);
    ++hits[static_cast<std::size_t>(u * bins)];
  }
  // Each bin is binomial: six standard deviations.
  for (int hit : hits) EXPECT_NEAR(hit, count / bins, 6 * std::sqrt(count / bins));
}

TEST(Philox, BelowStaysBelowAndIsRoughlyUniform) {
  const Philox numbers(2, Stream::test, 0);
  constexpr int count = 30000;
  for (std::uint64_t bound : {1ull, 2ull, 7ull, 50257ull, (1ull << 63) + 1, ~0ull}) {
    double mean = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t value = numbers.below(i, bound);
      ASSERT_LT(value, bound);
      mean += static_cast<double>(value) / count;
    }
    const double size = static_cast<double>(bound);
    EXPECT_NEAR(mean, (size - 1) / 2, 6 * size / std::sqrt(12.0 * count)) << bound;
  }
  std::array<int, 7> hits{};
  for (std::uint64_t i = 0; i < count; ++i) ++hits[numbers.below(i, 7)];
  for (int hit : hits) EXPECT_NEAR(hit, count / 7.0, 6 * std::sqrt(count / 7.0));
}

TEST(Philox, NormalHasTheMomentsOfANormal) {
  const Philox numbers(3, Stream::initial_value, name_hash("wte.weight"));
  constexpr int count = 100000;
  double first = 0, second = 0, fourth = 0, neighbours = 0, previous = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const double x = numbers.normal(i);
    first += x / count;
    second += x * x / count;
    fourth += x * x * x * x / count;
    neighbours += x * previous / count;
    previous = x;
  }
  // Six standard errors; the variances of x, x^2, x^4 and x y are 1, 2, 96 and 1.
  const double root = std::sqrt(count);
  EXPECT_NEAR(first, 0, 6 / root);
  EXPECT_NEAR(second, 1, 6 * std::sqrt(2.0) / root);
  EXPECT_NEAR(fourth, 3, 6 * std::sqrt(96.0) / root);
  EXPECT_NEAR(neighbours, 0, 6 / root);
}

TEST(Philox, FillNormalGivesTheSameNumbersFromAnyStart) {
  const Philox numbers(4, Stream::initial_value, 5);
  for (std::uint64_t first : {0ull, 1ull, 2ull, 9ull, (1ull << 40) + 1})
    for (std::uint64_t count : {0ull, 1ull, 2ull, 3ull, 8ull}) {
      std::vector<double> out(count + 1, -77);
      numbers.fill_normal(first, count, out.data());
      for (std::uint64_t i = 0; i < count; ++i)
        EXPECT_EQ(out[i], numbers.normal(first + i)) << first << " + " << i;
      EXPECT_EQ(out[count], -77);
    }
}

TEST(Philox, FillWordsGivesEveryWordOfEveryBlock) {
  const Philox numbers(7, Stream::test, 3);
  for (std::uint64_t first : {0ull, 1ull, 6ull, 4294967296ull * 4 - 2})
    for (std::uint64_t count : {0ull, 1ull, 3ull, 4ull, 11ull}) {
      std::vector<std::uint32_t> out(count + 1, 77);
      numbers.fill_words(first, count, out.data());
      for (std::uint64_t i = 0; i < count; ++i)
        EXPECT_EQ(out[i], numbers.words((first + i) / 4)[(first + i) % 4]) << first << " + " << i;
      EXPECT_EQ(out[count], 77u);
    }
}

TEST(Philox, NameHashIsFnv1a) {
  // Test values of the FNV reference (http://www.isthe.com/chongo/tech/comp/fnv/).
  EXPECT_EQ(name_hash(""), 0xcbf29ce484222325ull);
  EXPECT_EQ(name_hash("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(name_hash("foobar"), 0x85944171f73967e8ull);
}

TEST(SplitRange, CoversInOrderWithSizesThatDifferByAtMostOne) {
  for (std::int64_t length : {0, 1, 2, 7, 8, 50257})
    for (std::int64_t parts : {1, 2, 3, 4, 8, 13}) {
      std::int64_t end = 0;
      for (std::int64_t index = 0; index < parts; ++index) {
        const Range range = split_range(length, parts, index);
        EXPECT_EQ(range.begin, end);  // starts where the one before ended: covers, and disjoint
        EXPECT_EQ(range.size(), length / parts + (index < length % parts ? 1 : 0));
        end = range.end;
      }
      EXPECT_EQ(end, length) << length << " over " << parts;
    }
}

}  // namespace
}  // namespace echelon::philox_test
