#include "tensor/normals.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

namespace echelon::normals_test {
namespace {

// One by one, by the C library.
std::vector<float> expected(const Philox& random, double deviation, std::uint64_t first, std::size_t count) {
  std::vector<float> all;
  for (std::size_t i = 0; i < count; ++i)
    all.push_back(static_cast<float>(deviation * random.normal(first + i)));
  return all;
}

void expect_same_bits(const Philox& random, double deviation, std::uint64_t first, std::size_t count) {
  std::vector<float> out(count, std::numeric_limits<float>::quiet_NaN());
  fill_normals(random, deviation, first, out);
  const std::vector<float> all = expected(random, deviation, first, count);
  for (std::size_t i = 0; i < count; ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(all[i]))
        << deviation << " of number " << first + i;
}

// So many that some of them are in doubt.
TEST(Normals, AreThoseOfTheCLibraryToTheBit) {
  const Philox random(1, Stream::initial_value, name_hash("transformer.wte.weight"));
  for (const double deviation : {0.02, 1.0, 0.02 / 7})
    expect_same_bits(random, deviation, (std::uint64_t{1} << 33) - 1000, 400000);
}

TEST(Normals, BeginAndEndAnywhere) {
  const Philox random(7, Stream::initial_value, 3);
  for (const std::uint64_t first : {0ull, 1ull, 2ull, 5ull, 1ull << 40})
    for (std::size_t count = 0; count < 40; ++count) expect_same_bits(random, 0.02, first, count);
}

// All of them are in doubt: zeros by their signs, and what lies halfway between two numbers next to zero.
TEST(Normals, AreRightWhereAllAreInDoubt) {
  const Philox random(7, Stream::initial_value, 3);
  for (const double deviation : {0.0, -0.0, 1e-45, 1e-300}) expect_same_bits(random, deviation, 0, 1000);
}

}  // namespace
}  // namespace echelon::normals_test
