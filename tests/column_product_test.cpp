// A product as a library computes it that stores columns, by its definition, is the reference kernels'.
#include "tensor/column_product.h"

#include <gtest/gtest.h>

#include "tensor_checks.h"

namespace echelon::column_product_test {
namespace {

using namespace checks;

// Element (i, j) of op(m).
double element(const ColumnMatrix& m, std::int64_t i, std::int64_t j) {
  const std::int64_t row = m.transposed ? j : i, col = m.transposed ? i : j;
  check(row < m.rows && col < m.cols, "a test reads beyond a matrix");
  return m.tensor->host<double>()[row + col * m.stride];
}

void multiply_columns(const ColumnProduct& p, bool accumulate) {
  const std::int64_t depth = p.first.transposed ? p.first.rows : p.first.cols;
  check(depth == (p.second.transposed ? p.second.cols : p.second.rows), "the operands meet");
  for (std::int64_t j = 0; j < p.result.cols; ++j)
    for (std::int64_t i = 0; i < p.result.rows; ++i) {
      double sum = 0;
      for (std::int64_t k = 0; k < depth; ++k) sum += element(p.first, i, k) * element(p.second, k, j);
      double& to = p.result.tensor->host<double>()[i + j * p.result.stride];
      to = accumulate ? to + sum : sum;
    }
}

TEST(ColumnProduct, IsTheSameProduct) {
  Arena arena;
  const auto kernels = make_reference_kernels();
  constexpr std::int64_t m = 3, n = 5, depth = 4;
  for (const Transpose ta : {Transpose::no, Transpose::yes})
    for (const Transpose tb : {Transpose::no, Transpose::yes})
      for (bool accumulate : {false, true}) {
        const bool turn_a = ta == Transpose::yes, turn_b = tb == Transpose::yes;
        const Tensor a = random_strided(arena, turn_a ? depth : m, turn_a ? m : depth, 1),
                     b = random_strided(arena, turn_b ? n : depth, turn_b ? depth : n, 2),
                     c = random_strided(arena, m, n, 3), expected = clone(arena, c);
        kernels->matmul(a, ta, b, tb, expected, accumulate);
        const MatrixProduct product{a, ta, b, tb, c, accumulate};
        multiply_columns(column_product(product), accumulate);
        expect_near(c, expected, 16 * epsilon);
      }
}

}  // namespace
}  // namespace echelon::column_product_test
