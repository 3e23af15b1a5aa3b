// A product as a library computes it that stores columns, by its definition, is the reference kernels'.
#include "tensor/column_product.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "tensor/even_product.h"
#include "tensor/host.h"
#include "tensor/rows/activations.h"
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

void multiply_columns(const ColumnProduct& p, const std::optional<ColumnMatrix>& onto) {
  const std::int64_t depth = p.first.transposed ? p.first.rows : p.first.cols;
  check(depth == (p.second.transposed ? p.second.cols : p.second.rows), "the operands meet");
  for (std::int64_t j = 0; j < p.result.cols; ++j)
    for (std::int64_t i = 0; i < p.result.rows; ++i) {
      double sum = 0;
      for (std::int64_t k = 0; k < depth; ++k) sum += element(p.first, i, k) * element(p.second, k, j);
      double& to = p.result.tensor->host<double>()[i + j * p.result.stride];
      to = onto ? onto->tensor->host<double>()[i + j * onto->stride] + sum : sum;
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
        const std::optional<FollowedProduct> alone = followed_product(product, {});
        ASSERT_TRUE(alone.has_value());
        EXPECT_EQ(alone->onto.has_value(), accumulate);
        multiply_columns(alone->product, alone->onto);
        expect_near(c, expected, 16 * epsilon);
      }
}

// Of any extents it is the same product; each part is one that is done in one piece, and has an even extent
// where there is more than the rest.
TEST(EvenProduct, IsTheSameProduct) {
  Arena arena;
  const auto kernels = make_reference_kernels();
  const Tensor room(arena, MemoryCategory::other, DType::u8, {3 * 19 * 4});  // 3 rows at once
  for (const Transpose ta : {Transpose::no, Transpose::yes})
    for (const Transpose tb : {Transpose::no, Transpose::yes})
      for (const bool accumulate : {false, true})
        for (const DType result : {DType::bf16, DType::f32})
          for (const auto& [m, n, depth] :
               {std::array<std::int64_t, 3>{17, 19, 21}, {16, 16, 23}, {5, 24, 33}}) {
            const auto narrow = [&](std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
              const Tensor x(arena, MemoryCategory::other, DType::bf16, {rows, cols});
              copy_numbers_from_host(copy_numbers_to_host(random_strided(arena, rows, cols, seed)), x);
              return x;
            };
            const bool turn_a = ta == Transpose::yes, turn_b = tb == Transpose::yes;
            const Tensor a = turn_a ? narrow(depth, m, 1) : narrow(m, depth, 1),
                         b = turn_b ? narrow(n, depth, 2) : narrow(depth, n, 2),
                         c(arena, MemoryCategory::other, result, {m, n}),
                         expected(arena, MemoryCategory::other, DType::f32, {m, n});
            kernels->fill(c, 0.5);
            kernels->fill(expected, 0.5);
            kernels->matmul(a, ta, b, tb, expected, accumulate);
            int parts = 0;
            const auto multiply = [&](const MatrixProduct& p) {
              ++parts;
              EXPECT_TRUE(p.c.cols() % 8 == 0 || p.c.cols() < 8);
              kernels->matmul(p.a, p.ta, p.b, p.tb, p.c, p.accumulate);
            };
            const auto round = [&](const Tensor& sums, const Tensor& to) { kernels->copy(sums, to); };
            EvenProduct(room, multiply, round).run({a, ta, b, tb, c, accumulate});
            EXPECT_GT(parts, n % 8 == 0 ? 0 : 1);
            const std::vector<double> got = copy_numbers_to_host(c), wanted = copy_numbers_to_host(expected);
            for (std::size_t i = 0; i < got.size(); ++i)
              EXPECT_NEAR(got[i], wanted[i],
                          (result == DType::bf16 ? 0x1p-8 : 0x1p-20) * (1 + std::abs(wanted[i])));
          }
}

// By what cuBLASLt's header says of each epilogue.
void follow_columns(const FollowedProduct& f) {
  using Kind = ColumnEpilogue::Kind;
  const ColumnMatrix& d = f.product.result;
  const auto vector = [&](std::int64_t i) -> double& { return f.epilogue.vector->host<double>()[i]; };
  const auto beside = [&](std::int64_t i, std::int64_t j) -> double& {
    return f.epilogue.beside->host<double>()[i + j * f.epilogue.beside->row_stride()];
  };
  for (std::int64_t j = 0; j < d.cols; ++j)
    for (std::int64_t i = 0; i < d.rows; ++i) {
      double& x = d.tensor->host<double>()[i + j * d.stride];
      switch (f.epilogue.kind) {
        case Kind::bias:
          x += vector(i);
          break;
        case Kind::bias_gelu:
          x += vector(i);
          [[fallthrough]];
        case Kind::gelu:
          beside(i, j) = x;
          x = rows::gelu_of(x);
          break;
        case Kind::gelu_slope:
          x *= rows::gelu_slope(beside(i, j));
          break;
        default:
          break;
      }
    }
  const ColumnMatrix &first = f.product.first, &second = f.product.second;
  const std::int64_t depth = first.transposed ? first.rows : first.cols;
  const bool of_first = f.epilogue.kind == Kind::sums_of_first;
  if (!of_first && f.epilogue.kind != Kind::sums_of_second) return;
  check(f.epilogue.vector->numel() == (of_first ? d.rows : d.cols), "a sum for each row or column");
  for (std::int64_t i = 0; i < f.epilogue.vector->numel(); ++i) {
    vector(i) = 0;
    for (std::int64_t k = 0; k < depth; ++k)
      vector(i) += of_first ? element(first, i, k) : element(second, k, i);
  }
}

TEST(ColumnProduct, IsFollowedByTheSame) {
  Arena arena;
  const auto kernels = make_reference_kernels();
  constexpr std::int64_t m = 3, n = 5, depth = 4;
  const auto both = [&](std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
    const Tensor x = random_strided(arena, rows, cols, seed);
    return std::pair{x, clone(arena, x)};
  };
  const auto vector_of = [&](std::int64_t count, std::uint64_t seed) {
    const Tensor x = random(arena, {count}, seed);
    return std::pair{x, clone(arena, x)};
  };
  for (const bool turned : {false, true}) {
    const Tensor a = turned ? random_strided(arena, depth, m, 1) : random_strided(arena, m, depth, 1),
                 b = random_strided(arena, depth, n, 2);
    const auto product = [&](const Tensor& c, bool accumulate) {
      return MatrixProduct{a, turned ? Transpose::yes : Transpose::no, b, Transpose::no, c, accumulate};
    };
    const auto expect_same = [&](const Epilogue& of_library, const Epilogue& expected, bool accumulate,
                                 ColumnEpilogue::Kind kind) {
      const auto [c, c_expected] = both(m, n, 3);
      const MatrixProduct mine = product(c, accumulate);
      const std::optional<FollowedProduct> followed = followed_product(mine, of_library);
      ASSERT_TRUE(followed.has_value());
      EXPECT_EQ(followed->epilogue.kind, kind);
      multiply_columns(followed->product, followed->onto);
      follow_columns(*followed);
      kernels->matmul(product(c_expected, accumulate), expected);
      expect_near(c, c_expected, 16 * epsilon);
    };
    using Kind = ColumnEpilogue::Kind;
    const auto [bias, same_bias] = vector_of(n, 4);
    expect_same({.bias = bias}, {.bias = same_bias}, false, Kind::bias);
    {
      const Tensor x = random_strided(arena, m, n, 9);
      expect_same({.added = x}, {.added = x}, false, Kind::none);
      expect_same({.bias = bias, .added = x}, {.bias = bias, .added = x}, false, Kind::bias);
    }
    for (const bool biased : {false, true}) {
      const auto [y, y_expected] = both(m, n, 5);
      const Tensor with = biased ? bias : Tensor();
      expect_same({.bias = with, .activated = y}, {.bias = with, .activated = y_expected}, false,
                  biased ? Kind::bias_gelu : Kind::gelu);
      expect_near(y, y_expected, 16 * epsilon);
    }
    {
      const auto [hidden, hidden_expected] = both(m, n, 6);
      expect_same({.hidden = hidden}, {.hidden = hidden_expected}, false, Kind::gelu_slope);
      kernels->activate(Activation::gelu, hidden, {}, hidden);  // which is left to do
      expect_near(hidden, hidden_expected, 16 * epsilon);
    }
    for (const bool of_b : {false, true}) {
      if (!of_b && !turned) continue;
      const auto [sums, expected] = vector_of(of_b ? n : m, 7);
      const Tensor before = clone(arena, sums);
      expect_same({.column_sums = sums, .sums_of_b = of_b}, {.column_sums = expected, .sums_of_b = of_b},
                  true, of_b ? Kind::sums_of_first : Kind::sums_of_second);
      kernels->add(before, sums);
      expect_near(sums, expected, 16 * epsilon);
    }
    // Which it has no pass for.
    const auto [c, y] = both(m, n, 8);
    const MatrixProduct one = product(c, false);
    EXPECT_FALSE(followed_product(one, {.activation = Activation::gelu_erf, .activated = y}));
    EXPECT_FALSE(followed_product(one, {.activation = Activation::relu2, .hidden = y}));
    EXPECT_FALSE(followed_product(one, {.bias = bias, .hidden = y}));
    EXPECT_FALSE(followed_product(one, {.activated = y, .column_sums = bias, .sums_of_b = true}));
  }
}

// Beside the rounding of bf16 an approximate GELU does not show; beside that of f32 it does.
TEST(ColumnProduct, AnApproximateGeluIsForBf16Alone) {
  using Kind = ColumnEpilogue::Kind;
  for (const Kind kind : {Kind::none, Kind::bias, Kind::gelu, Kind::bias_gelu, Kind::gelu_slope,
                          Kind::sums_of_first, Kind::sums_of_second}) {
    const bool takes_tanh = kind == Kind::gelu || kind == Kind::bias_gelu || kind == Kind::gelu_slope;
    EXPECT_TRUE(is_exact_enough(kind, DType::bf16));
    EXPECT_EQ(is_exact_enough(kind, DType::f32), !takes_tanh);
    EXPECT_EQ(is_exact_enough(kind, DType::f64), !takes_tanh);
  }
}

}  // namespace
}  // namespace echelon::column_product_test
