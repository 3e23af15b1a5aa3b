#include "tensor/orthonormalize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"

namespace echelon::orthonormalize_test {
namespace {

template <class F>
class OrthonormalizeOf : public testing::Test {};
using Floats = testing::Types<float, double>;
TYPED_TEST_SUITE(OrthonormalizeOf, Floats);

template <class F>
struct Rows {
  std::int64_t rows, cols;
  std::vector<F> x;
  Rows(std::int64_t r, std::int64_t c) : rows(r), cols(c), x(static_cast<std::size_t>(r * c)) {
    const Philox random(5, Stream::test, static_cast<std::uint64_t>(r * 1000 + c));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<F>(random.normal(i));
  }
  F* operator[](std::int64_t row) { return x.data() + row * cols; }
  double dot(const F* a, const F* b) const {
    double sum = 0;
    for (std::int64_t c = 0; c < cols; ++c) sum += static_cast<double>(a[c]) * static_cast<double>(b[c]);
    return sum;
  }
  void orthonormalize(std::uint64_t seed = 9) {
    orthonormalize_rows(x.data(), rows, cols, Philox(seed, Stream::test, 1));
  }
  // The second pass rounds each element once for each row above it, and two divisions set the length: a
  // product of two rows is off by at most (rows + 2) unit roundoffs of eps / 2, of either row.
  void expect_orthonormal() {
    const double bound =
        static_cast<double>(rows + 2) * static_cast<double>(std::numeric_limits<F>::epsilon());
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j <= i; ++j)
        ASSERT_NEAR(dot((*this)[i], (*this)[j]), i == j ? 1 : 0, bound) << i << " " << j;
  }
};

TYPED_TEST(OrthonormalizeOf, RandomRowsOfAnyShapeAndSize) {
  for (auto [rows, cols] : {std::pair{1, 1}, {1, 9}, {4, 4}, {4, 300}, {32, 70}, {16, 1001}})
    for (double magnitude : {1.0, 1e-36, 1e36}) {
      Rows<TypeParam> m(rows, cols);
      for (TypeParam& x : m.x) x *= static_cast<TypeParam>(magnitude);
      m.orthonormalize();
      m.expect_orthonormal();
    }
}

TYPED_TEST(OrthonormalizeOf, KeepsTheSpanOfTheFirstRows) {
  using F = TypeParam;
  Rows<F> m(5, 60), before(5, 60);
  m.orthonormalize();
  // Row i lies in the span of rows 0 .. i: taking away its parts along them leaves rounding.
  for (std::int64_t i = 0; i < 5; ++i) {
    std::vector<double> left(before[i], before[i] + 60);
    for (std::int64_t j = 0; j <= i; ++j) {
      const double along = before.dot(before[i], m[j]);
      for (std::size_t c = 0; c < 60; ++c) left[c] -= along * static_cast<double>(m[j][c]);
    }
    double norm = 0;
    for (double x : left) norm += x * x;
    const double eps = static_cast<double>(std::numeric_limits<F>::epsilon());
    EXPECT_LE(std::sqrt(norm), 5 * eps * std::sqrt(before.dot(before[i], before[i]))) << i;
  }
}

TYPED_TEST(OrthonormalizeOf, NearlyDependentRows) {
  using F = TypeParam;
  const double eps = static_cast<double>(std::numeric_limits<F>::epsilon());
  for (double apart : {1e-2, std::sqrt(eps), 100 * eps, 10 * eps, eps}) {
    Rows<F> m(6, 200);
    for (std::int64_t i = 1; i < 6; ++i)
      for (std::int64_t c = 0; c < 200; ++c)
        m[i][c] = static_cast<F>(static_cast<double>(m[0][c]) + apart * static_cast<double>(m[i][c]));
    m.orthonormalize();
    m.expect_orthonormal();
  }
}

TYPED_TEST(OrthonormalizeOf, RowsWithoutADirectionAreDrawn) {
  using F = TypeParam;
  Rows<F> m(4, 50);
  for (std::int64_t c = 0; c < 50; ++c) {
    m[1][c] = 2 * m[0][c];
    m[2][c] = 0;
    m[3][c] = m[0][c] + m[1][c];
  }
  Rows<F> again = m, other = m;
  m.orthonormalize();
  m.expect_orthonormal();
  again.orthonormalize();
  EXPECT_EQ(m.x, again.x);
  other.orthonormalize(10);
  EXPECT_NE(m.x, other.x);
  EXPECT_EQ(0, std::memcmp(m[0], other[0], 50 * sizeof(F)));  // it had one
}

TYPED_TEST(OrthonormalizeOf, ANanShows) {
  using F = TypeParam;
  for (F bad : {std::numeric_limits<F>::quiet_NaN(), std::numeric_limits<F>::infinity()}) {
    Rows<F> m(3, 20);
    m[1][4] = bad;
    m.orthonormalize();
    EXPECT_TRUE(std::isfinite(m[0][0]));
    EXPECT_TRUE(std::isnan(m[1][4]));
    EXPECT_TRUE(std::isnan(m[2][4]));
  }
}

TEST(Orthonormalize, RefusesMoreRowsThanColumns) {
  Rows<double> m(3, 2);
  EXPECT_THROW(m.orthonormalize(), InvariantError);
}

}  // namespace
}  // namespace echelon::orthonormalize_test
