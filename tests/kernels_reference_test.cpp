// Forwards against formulas that are not the kernel's own loop, backwards against central differences, in
// f64. The f32 kernels are the same templates: one test at the end runs each against its f64 twin.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "tensor/kernels.h"
#include "tensor_checks.h"

namespace echelon::kernels_reference_test {
namespace {

using namespace checks;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

class KernelsReference : public ::testing::Test {
 protected:
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();

  Tensor unwritten(std::vector<std::int64_t> shape) { return constant(arena, std::move(shape), nan); }
  // A strided view and the wider matrix it lies in, so that a test can see what was written beside it.
  struct Framed {
    Tensor frame, view;
    void expect_frame_untouched(double value) const {
      for_each(frame, [&](std::int64_t i, std::int64_t j) {
        if (j < 2 || j >= 2 + view.cols()) {
          EXPECT_EQ(at(frame, i, j), value) << "written outside, row " << i << " column " << j;
        }
      });
    }
  };
  Framed framed(std::int64_t rows, std::int64_t cols, double value) {
    const Tensor frame = constant(arena, {rows, cols + 5}, value);
    return {frame, frame.column_range(2, 2 + cols)};
  }
};

TEST_F(KernelsReference, MatmulHonoursTransposesStridesAndAccumulation) {
  struct Sizes {
    std::int64_t m, n, depth;
  };
  // 19 columns: one full panel and a part of one. Depth 0: an empty sum.
  for (const Sizes& sizes : {Sizes{3, 19, 5}, {1, 1, 1}, {17, 16, 2}, {2, 3, 0}})
    for (bool ta : {false, true})
      for (bool tb : {false, true})
        for (bool accumulate : {false, true}) {
          const std::int64_t m = sizes.m, n = sizes.n, depth = sizes.depth;
          const Tensor a = random_strided(arena, ta ? depth : m, ta ? m : depth, 1);
          const Tensor b = random_strided(arena, tb ? n : depth, tb ? depth : n, 2);
          const Framed c = framed(m, n, accumulate ? 0.5 : nan);
          for_each(c.view,
                   [&](std::int64_t i, std::int64_t j) { at(c.view, i, j) = accumulate ? 3.0 : nan; });
          kernels->matmul(a, ta ? Transpose::yes : Transpose::no, b, tb ? Transpose::yes : Transpose::no,
                          c.view, accumulate);
          for_each(c.view, [&](std::int64_t i, std::int64_t j) {
            double expected = accumulate ? 3.0 : 0.0;
            for (std::int64_t k = 0; k < depth; ++k)
              expected += (ta ? at(a, k, i) : at(a, i, k)) * (tb ? at(b, j, k) : at(b, k, j));
            EXPECT_NEAR(at(c.view, i, j), expected, 64 * epsilon) << ta << tb << accumulate;
          });
          if (accumulate) c.expect_frame_untouched(0.5);
        }
}

TEST_F(KernelsReference, AccumulatingEqualsAddingAfterwardsToTheLastBit) {
  const Tensor a = random(arena, {9, 4}, 1), b = random(arena, {9, 7}, 2), once = unwritten({4, 7});
  const Tensor c = random(arena, {4, 7}, 3), d = clone(arena, c);
  kernels->matmul(a, Transpose::yes, b, Transpose::no, c, true);
  kernels->matmul(a, Transpose::yes, b, Transpose::no, once, false);
  kernels->add(once, d);
  expect_near(c, d, 0);
}

TEST_F(KernelsReference, MatmulGradientsAreTheTransposedProducts) {
  const Tensor a = random(arena, {3, 4}, 1), b = random(arena, {4, 5}, 2), dc = random(arena, {3, 5}, 3);
  const Tensor c = unwritten({3, 5}), da = unwritten({3, 4}), db = unwritten({4, 5});
  kernels->matmul(dc, Transpose::no, b, Transpose::yes, da, false);
  kernels->matmul(a, Transpose::yes, dc, Transpose::no, db, false);
  const auto loss = [&] {
    kernels->matmul(a, Transpose::no, b, Transpose::no, c, false);
    return inner(c, dc);
  };
  expect_gradient(a, da, loss, "da");
  expect_gradient(b, db, loss, "db");
}

TEST_F(KernelsReference, ElementwiseOperations) {
  const Tensor x = random_strided(arena, 3, 4, 1), y = random(arena, {3, 4}, 2), before = clone(arena, y);
  const Framed z = framed(3, 4, 0.25);
  kernels->copy(x, z.view);
  expect_near(z.view, x, 0);
  kernels->scale(z.view, -2);
  kernels->add(z.view, y);
  for_each(
      y, [&](std::int64_t i, std::int64_t j) { EXPECT_EQ(at(y, i, j), at(before, i, j) - 2 * at(x, i, j)); });
  kernels->fill(z.view, 3);
  for_each(z.view, [&](std::int64_t i, std::int64_t j) { EXPECT_EQ(at(z.view, i, j), 3); });
  z.expect_frame_untouched(0.25);
}

TEST_F(KernelsReference, SumsAreTakenInOrderByBlock) {
  std::vector<double> values(150, 0x1p-53);
  values[0] = values[149] = 1;  // to which so little adds nothing, where it comes first
  const Tensor x = Tensor::view_of(values.data(), DType::f64, {std::ssize(values)});
  const auto sums = [&](const Tensor& of, std::int64_t block) {
    std::vector<double> result(static_cast<std::size_t>((of.numel() + block - 1) / block), -1.0);
    kernels->sum_in_order(of, block, Tensor::view_of(result.data(), DType::f64, {std::ssize(result)}));
    return result;
  };
  EXPECT_EQ(sums(x, 149), (std::vector{1.0, 1.0}));
  EXPECT_EQ(sums(x, 64),
            (std::vector{1.0, 0x1p-47, 1 + 0x1p-52 * 10}));  // 21 halves of a last place before it
  EXPECT_EQ(sums(x.flat_range(0, 0), 64), std::vector<double>{});
}

TEST_F(KernelsReference, SumsOfSquaresOfF32AreTakenInDoubleByBlock) {
  std::vector<float> values(1025, 0x1p-6f);
  values[0] = 1e4f;  // in f32 the squares of the others would vanish beside this one
  const Tensor x = Tensor::view_of(values.data(), DType::f32, {1025});
  const auto sums = [&](const Tensor& of, std::int64_t block) {
    std::vector<double> result(static_cast<std::size_t>((of.numel() + block - 1) / block), -1.0);
    kernels->sum_squares(of, block, Tensor::view_of(result.data(), DType::f64, {std::ssize(result)}));
    return result;
  };
  EXPECT_EQ(sums(x, 2000), std::vector{1e8 + 1024 * 0x1p-12});
  EXPECT_EQ(sums(x, 1025), std::vector{1e8 + 1024 * 0x1p-12});
  EXPECT_EQ(sums(x, 1024), (std::vector{1e8 + 1023 * 0x1p-12, 0x1p-12}));
  EXPECT_EQ(sums(x, 500), (std::vector{1e8 + 499 * 0x1p-12, 500 * 0x1p-12, 25 * 0x1p-12}));
  values[0] = 1.1f;  // its square needs more digits than f32 has
  EXPECT_EQ(sums(x.flat_range(0, 1), 7), std::vector{double{1.1f} * double{1.1f}});
  EXPECT_EQ(sums(x.flat_range(0, 0), 7), std::vector<double>{});
}

TEST_F(KernelsReference, AllFiniteFindsOneBadElement) {
  const Tensor x = random_strided(arena, 4, 3, 1);
  EXPECT_TRUE(kernels->all_finite(x));  // the frame is finite too
  for (double bad :
       {nan, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    at(x, 2, 1) = bad;
    EXPECT_FALSE(kernels->all_finite(x));
  }
}

TEST_F(KernelsReference, BiasAndResidual) {
  const Tensor x = random(arena, {3, 4}, 1), y = random(arena, {3, 4}, 2), bias = random(arena, {4}, 3);
  const Tensor out = unwritten({3, 4}), biased = clone(arena, y);
  kernels->add_bias(bias, biased);
  for_each(
      y, [&](std::int64_t i, std::int64_t j) { EXPECT_EQ(at(biased, i, j), at(y, i, j) + at(bias, 0, j)); });
  kernels->residual(x, y, Tensor(), out);
  for_each(y, [&](std::int64_t i, std::int64_t j) { EXPECT_EQ(at(out, i, j), at(x, i, j) + at(y, i, j)); });
  kernels->residual(x, y, bias, out);
  const Tensor in_place = clone(arena, y);
  kernels->residual(x, in_place, bias, in_place);
  expect_near(in_place, out, 0);
  for_each(y, [&](std::int64_t i, std::int64_t j) {
    EXPECT_NEAR(at(out, i, j), at(x, i, j) + at(y, i, j) + at(bias, 0, j), 8 * epsilon);
  });

  const Tensor dy = random(arena, {3, 4}, 4), dbias = random(arena, {4}, 5), before = clone(arena, dbias);
  kernels->bias_gradient(dy, dbias);
  const auto loss = [&] {
    kernels->residual(x, y, bias, out);
    return inner(out, dy);
  };
  expect_gradient(bias, added(arena, dbias, before), loss, "dbias");
}

TEST_F(KernelsReference, LayerNorm) {
  const std::int64_t rows = 3, cols = 5;
  const double eps = 1e-3;
  const Tensor x = random(arena, {rows, cols}, 1), w = random(arena, {cols}, 2), b = random(arena, {cols}, 3);
  const Tensor y = unwritten({rows, cols}), again = unwritten({rows, cols}), stats = unwritten({rows, 2});
  kernels->layer_norm(x, w, b, eps, y, stats);
  for (std::int64_t i = 0; i < rows; ++i) {
    double mean = 0, mean_square = 0;
    for (std::int64_t j = 0; j < cols; ++j) {
      mean += at(x, i, j) / static_cast<double>(cols);
      mean_square += at(x, i, j) * at(x, i, j) / static_cast<double>(cols);
    }
    const double rstd = std::pow(mean_square - mean * mean + eps, -0.5);
    EXPECT_NEAR(at(stats, i, 0), mean, 16 * epsilon);
    EXPECT_NEAR(at(stats, i, 1), rstd, 64 * epsilon * rstd);
    for (std::int64_t j = 0; j < cols; ++j)
      EXPECT_NEAR(at(y, i, j), (at(x, i, j) - mean) * rstd * at(w, 0, j) + at(b, 0, j), 256 * epsilon);
  }
  kernels->layer_norm_again(x, w, b, stats, again);
  expect_near(again, y, 0);

  const Tensor dy = random(arena, {rows, cols}, 4);
  const Tensor dx = random(arena, {rows, cols}, 5), dx_before = clone(arena, dx);
  const Tensor dw = random(arena, {cols}, 6), dw_before = clone(arena, dw);
  const Tensor db = random(arena, {cols}, 7), db_before = clone(arena, db);
  kernels->layer_norm_backward_input(dy, x, w, stats, dx);
  kernels->layer_norm_backward_weight(dy, x, stats, dw, db);
  const auto loss = [&] {
    kernels->layer_norm(x, w, b, eps, y, stats);
    return inner(y, dy);
  };
  expect_gradient(x, added(arena, dx, dx_before), loss, "dx");
  expect_gradient(w, added(arena, dw, dw_before), loss, "dw");
  expect_gradient(b, added(arena, db, db_before), loss, "db");
}

TEST_F(KernelsReference, RmsNorm) {
  const std::int64_t rows = 3, cols = 5;
  const double eps = 1e-3;
  const Tensor x = random(arena, {rows, cols}, 1), w = random(arena, {cols}, 2);
  const Tensor y = unwritten({rows, cols}), again = unwritten({rows, cols}), stats = unwritten({rows, 1});
  kernels->rms_norm(x, w, eps, y, stats);
  for (std::int64_t i = 0; i < rows; ++i) {
    const Tensor row = x.row_range(i, i + 1);
    const double root = std::sqrt(inner(row, row) / static_cast<double>(cols) + eps);
    for (std::int64_t j = 0; j < cols; ++j)
      EXPECT_NEAR(at(y, i, j), at(x, i, j) / root * at(w, 0, j), 32 * epsilon);
  }
  kernels->rms_norm_again(x, w, stats, again);
  expect_near(again, y, 0);

  const Tensor dy = random(arena, {rows, cols}, 4);
  const Tensor dx = random(arena, {rows, cols}, 5), dx_before = clone(arena, dx);
  const Tensor dw = random(arena, {cols}, 6), dw_before = clone(arena, dw);
  kernels->rms_norm_backward_input(dy, x, w, stats, dx);
  kernels->rms_norm_backward_weight(dy, x, stats, dw);
  const auto loss = [&] {
    kernels->rms_norm(x, w, eps, y, stats);
    return inner(y, dy);
  };
  expect_gradient(x, added(arena, dx, dx_before), loss, "dx");
  expect_gradient(w, added(arena, dw, dw_before), loss, "dw");
}

// Rows cut into runs of columns, whose sums are added up here as ranks do: as the whole rows' norm.
TEST_F(KernelsReference, RmsNormOfRowsThatAreCut) {
  const std::int64_t rows = 3, cols = 7, cut = 3;
  const double eps = 1e-3, columns = static_cast<double>(cols);
  const Tensor x = random(arena, {rows, cols}, 1), w = random(arena, {cols}, 2);
  const Tensor y = unwritten({rows, cols}), stats = unwritten({rows, 1});
  const Tensor dy = random(arena, {rows, cols}, 4), dx = random(arena, {rows, cols}, 5);
  const Tensor dx_of_cut = clone(arena, dx), y_of_cut = unwritten({rows, cols});
  kernels->rms_norm(x, w, eps, y, stats);
  kernels->rms_norm_backward_input(dy, x, w, stats, dx);

  const std::array<Range, 2> parts{Range{0, cut}, Range{cut, cols}};
  const auto sum_over_parts = [&](const auto& of_part) {
    const Tensor sum = unwritten({rows, 1}), part_sum = unwritten({rows, 1});
    kernels->fill(sum, 0.0);
    for (const Range& part : parts) {
      of_part(part, part_sum);
      kernels->add(part_sum, sum);
    }
    return sum;
  };
  const auto columns_of = [](const Tensor& t, const Range& part) {
    return t.column_range(part.begin, part.end);
  };
  const auto weights_of = [&](const Range& part) { return w.flat_range(part.begin, part.end); };
  const Tensor squares = sum_over_parts(
      [&](const Range& part, const Tensor& to) { kernels->row_squares(columns_of(x, part), to); });
  Tensor rstd;
  for (const Range& part : parts) {
    rstd = clone(arena, squares);
    kernels->rms_norm_of_squares(columns_of(x, part), weights_of(part), eps, columns,
                                 columns_of(y_of_cut, part), rstd);
  }
  expect_near(rstd, stats, 8 * epsilon);
  expect_near(y_of_cut, y, 32 * epsilon);
  const Tensor sums = sum_over_parts([&](const Range& part, const Tensor& to) {
    kernels->rms_norm_backward_sums(columns_of(dy, part), columns_of(x, part), weights_of(part), rstd, to);
  });
  for (const Range& part : parts)
    kernels->rms_norm_backward_input_of_sums(columns_of(dy, part), columns_of(x, part), weights_of(part),
                                             rstd, sums, columns, columns_of(dx_of_cut, part));
  expect_near(dx_of_cut, dx, 64 * epsilon);
}

TEST_F(KernelsReference, Gelu) {
  // x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) at 40 digits.
  const std::array<std::array<double, 2>, 8> known{{{-3, -0.0036373920817730188378},
                                                    {-1, -0.15880800939172329522},
                                                    {-0.5, -0.15428599017485607796},
                                                    {0, 0},
                                                    {0.25, 0.14967535070168500023},
                                                    {1, 0.84119199060827670478},
                                                    {2, 1.9545976940877750188},
                                                    {5, 4.999999770820380337}}};
  const Tensor h = unwritten({1, 8}), y = unwritten({1, 8});
  for (std::int64_t j = 0; j < 8; ++j) at(h, 0, j) = known[static_cast<std::size_t>(j)][0];
  kernels->activate(Activation::gelu, h, Tensor(), y);
  for (std::int64_t j = 0; j < 8; ++j)
    EXPECT_NEAR(at(y, 0, j), known[static_cast<std::size_t>(j)][1], 4 * epsilon * std::max(1.0, at(y, 0, j)));

  // The bias goes into h, and y may be h.
  const Tensor x = random(arena, {3, 4}, 1), bias = random(arena, {4}, 2), biased = clone(arena, x);
  const Tensor separate = unwritten({3, 4}), in_place = clone(arena, x);
  kernels->activate(Activation::gelu, biased, bias, separate);
  kernels->activate(Activation::gelu, in_place, bias, in_place);
  expect_near(in_place, separate, 0);
  for_each(
      x, [&](std::int64_t i, std::int64_t j) { EXPECT_EQ(at(biased, i, j), at(x, i, j) + at(bias, 0, j)); });

  const Tensor dy = random(arena, {3, 4}, 3), dh = clone(arena, dy), h_to_y = clone(arena, biased);
  kernels->activate_backward(Activation::gelu, h_to_y, dh);
  expect_near(h_to_y, separate, 0);
  const auto loss = [&] {
    kernels->activate(Activation::gelu, biased, Tensor(), separate);
    return inner(separate, dy);
  };
  expect_gradient(biased, dh, loss, "dh");
}

TEST_F(KernelsReference, GeluOfTheErrorFunction) {
  // x (1 + erf(x / sqrt 2)) / 2, of tables of the normal distribution.
  const std::array<std::array<double, 2>, 4> known{
      {{-2, -0.0455002638963584}, {0, 0}, {1, 0.841344746068543}, {3, 2.99595030590511}}};
  const Tensor h = unwritten({1, 4}), y = unwritten({1, 4});
  for (std::int64_t j = 0; j < 4; ++j) at(h, 0, j) = known[static_cast<std::size_t>(j)][0];
  kernels->activate(Activation::gelu_erf, h, Tensor(), y);
  for (std::int64_t j = 0; j < 4; ++j)
    EXPECT_NEAR(at(y, 0, j), known[static_cast<std::size_t>(j)][1], 1e-14);  // the digits above
  const Tensor input = random(arena, {3, 4}, 1), dy = random(arena, {3, 4}, 3), out = unwritten({3, 4});
  const Tensor h_to_y = clone(arena, input), dh = clone(arena, dy);
  kernels->activate_backward(Activation::gelu_erf, h_to_y, dh);
  const auto loss = [&] {
    kernels->activate(Activation::gelu_erf, input, Tensor(), out);
    return inner(out, dy);
  };
  loss();
  expect_near(h_to_y, out, 0);
  expect_gradient(input, dh, loss, "dh");
}

TEST_F(KernelsReference, Relus) {
  const Tensor h = unwritten({1, 5}), y = unwritten({1, 5});
  const std::array<double, 5> x{-2, -0.5, 0, 0.5, 3}, positive{0, 0, 0, 0.5, 3};
  const Tensor input = random(arena, {3, 4}, 1), dy = random(arena, {3, 4}, 3), out = unwritten({3, 4});
  for (const Activation relu : {Activation::relu, Activation::relu2}) {
    for (std::int64_t j = 0; j < 5; ++j) at(h, 0, j) = x[static_cast<std::size_t>(j)];
    kernels->activate(relu, h, Tensor(), y);
    for (std::int64_t j = 0; j < 5; ++j) {
      const double p = positive[static_cast<std::size_t>(j)];
      EXPECT_EQ(at(y, 0, j), relu == Activation::relu ? p : p * p);
    }
    const Tensor h_to_y = clone(arena, input), dh = clone(arena, dy);
    kernels->activate_backward(relu, h_to_y, dh);
    const auto loss = [&] {
      kernels->activate(relu, input, Tensor(), out);
      return inner(out, dy);
    };
    loss();
    expect_near(h_to_y, out, 0);
    expect_gradient(input, dh, loss, "dh");
  }
  EXPECT_THROW(kernels->activate(Activation::swiglu, input, Tensor(), out), InvariantError);
}

TEST_F(KernelsReference, Swiglu) {
  const std::int64_t width = 4;
  const Tensor x = random(arena, {3, 2 * width}, 1), y = unwritten({3, width});
  kernels->gated(Activation::swiglu, x, y);
  for_each(y, [&](std::int64_t i, std::int64_t j) {
    const double gate = at(x, i, j);  // sigmoid(g) = (1 + tanh(g/2)) / 2
    EXPECT_NEAR(at(y, i, j), gate * (1 + std::tanh(gate / 2)) / 2 * at(x, i, width + j), 16 * epsilon);
  });
  const Tensor dy = random(arena, {3, width}, 2), dx = clone(arena, x), dy_to_y = clone(arena, dy);
  kernels->gated_backward(Activation::swiglu, dx, dy_to_y);
  expect_near(dy_to_y, y, 4 * epsilon);
  const auto loss = [&] {
    kernels->gated(Activation::swiglu, x, y);
    return inner(y, dy);
  };
  expect_gradient(x, dx, loss, "dgate_up");
  // The exponential of a very negative gate overflows; the result must not.
  at(x, 0, 0) = -1000;
  kernels->gated(Activation::swiglu, x, y);
  EXPECT_EQ(at(y, 0, 0), 0);
}

TEST_F(KernelsReference, ClampedSwiglu) {
  const std::int64_t width = 6;
  const SwigluClamp clamp{.alpha = 1.7, .limit = 0.6};
  const Tensor x = random(arena, {4, 2 * width}, 1), y = unwritten({4, width});
  kernels->gated(Activation::clamped_swiglu, x, y, clamp);
  int clamped = 0;
  for_each(y, [&](std::int64_t i, std::int64_t j) {
    const double gate = std::min(at(x, i, j), 0.6), up = at(x, i, width + j),
                 opened = up > 0.6 ? 0.6 : up < -0.6 ? -0.6 : up;
    clamped += gate != at(x, i, j) || opened != up;
    EXPECT_NEAR(at(y, i, j), gate * (1 + std::tanh(1.7 * gate / 2)) / 2 * (opened + 1), 16 * epsilon);
  });
  EXPECT_GT(clamped, 4);
  EXPECT_LT(clamped, 20);
  const Tensor dy = random(arena, {4, width}, 2), dx = clone(arena, x), dy_to_y = clone(arena, dy);
  kernels->gated_backward(Activation::clamped_swiglu, dx, dy_to_y, clamp);
  expect_near(dy_to_y, y, 4 * epsilon);
  const auto loss = [&] {
    kernels->gated(Activation::clamped_swiglu, x, y, clamp);
    return inner(y, dy);
  };
  expect_gradient(x, dx, loss, "dgate_up");
}

TEST_F(KernelsReference, Geglu) {
  const std::int64_t width = 4;
  const Tensor x = random(arena, {3, 2 * width}, 1), y = unwritten({3, width});
  kernels->gated(Activation::geglu, x, y);
  for_each(y, [&](std::int64_t i, std::int64_t j) {
    const double gate = at(x, i, j);
    const double inner = std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate);
    EXPECT_NEAR(at(y, i, j), gate * (1 + std::tanh(inner)) / 2 * at(x, i, width + j), 16 * epsilon);
  });
  const Tensor dy = random(arena, {3, width}, 2), dx = clone(arena, x), dy_to_y = clone(arena, dy);
  kernels->gated_backward(Activation::geglu, dx, dy_to_y);
  expect_near(dy_to_y, y, 4 * epsilon);
  const auto loss = [&] {
    kernels->gated(Activation::geglu, x, y);
    return inner(y, dy);
  };
  expect_gradient(x, dx, loss, "dgate_up");
}

// Of a norm without weights as of one whose weights are 1.
TEST_F(KernelsReference, RmsNormWithoutWeights) {
  const Tensor x = random(arena, {3, 5}, 1), dy = random(arena, {3, 5}, 2), ones = constant(arena, {5}, 1);
  std::vector<Tensor> made;
  for (const Tensor& w : {ones, Tensor()}) {
    const Tensor y = unwritten({3, 5}), again = unwritten({3, 5}), stats = unwritten({3}),
                 dx = constant(arena, {3, 5}, 0);
    kernels->rms_norm(x, w, 1e-5, y, stats);
    kernels->rms_norm_again(x, w, stats, again);
    kernels->rms_norm_backward_input(dy, x, w, stats, dx);
    for (const Tensor& one : {y, again, dx}) made.push_back(one);
  }
  for (std::size_t i = 0; i < 3; ++i) expect_near(made[i], made[i + 3], 0);
}

TEST_F(KernelsReference, SigmoidGate) {
  const Tensor x = random(arena, {3, 4}, 1), gate = random(arena, {3, 4}, 2), y = unwritten({3, 4});
  kernels->sigmoid_gate(x, gate, y);
  for_each(y, [&](std::int64_t i, std::int64_t j) {
    EXPECT_NEAR(at(y, i, j), at(x, i, j) / (1 + std::exp(-at(gate, i, j))), 16 * epsilon);
  });
  const Tensor dy = random(arena, {3, 4}, 3), dgate = clone(arena, gate), dx = clone(arena, dy),
               again = unwritten({3, 4});
  kernels->sigmoid_gate_backward(x, dgate, dx, again);
  expect_near(again, y, 4 * epsilon);
  const auto loss = [&] {
    kernels->sigmoid_gate(x, gate, y);
    return inner(y, dy);
  };
  expect_gradient(x, dx, loss, "dx");
  expect_gradient(gate, dgate, loss, "dgate");
}

TEST_F(KernelsReference, Xielu) {
  const Tensor h = random(arena, {3, 5}, 1), alphas = random(arena, {2}, 2), y = unwritten({3, 5});
  kernels->xielu(h, alphas, y);
  const auto softplus = [&](std::int64_t i) { return std::log1p(std::exp(alphas.host<double>()[i])); };
  for_each(y, [&](std::int64_t i, std::int64_t j) {
    const double x = at(h, i, j);
    EXPECT_NEAR(at(y, i, j),
                x / 2 + (x > 0 ? softplus(0) * x * x : (0.5 + softplus(1)) * (std::expm1(x) - x)),
                16 * epsilon);
  });
  const Tensor dy = random(arena, {3, 5}, 3), again = clone(arena, h), dh = clone(arena, dy),
               parts = unwritten({3, 2}), dalphas = constant(arena, {2}, 0);
  kernels->xielu_backward(again, alphas, dh, parts.flat());
  kernels->bias_gradient(parts, dalphas);
  expect_near(again, y, 4 * epsilon);
  const auto loss = [&] {
    kernels->xielu(h, alphas, y);
    return inner(y, dy);
  };
  expect_gradient(h, dh, loss, "dh");
  expect_gradient(alphas, dalphas, loss, "dalphas");
}

TEST_F(KernelsReference, RopePairsHalvesAndTurnsThemByThePosition) {
  const Tensor x = constant(arena, {4, 8}, 0);  // 2 sequences of 2 tokens, 2 heads of 4
  for (std::int64_t r = 0; r < 4; ++r) at(x, r, 0) = at(x, r, 4 + 1) = 1;
  kernels->rope(x, 4, integers(arena, {10, 11, 10, 11}), RopeTurns::plain(10000, 4), false);
  for (std::int64_t r = 0; r < 4; ++r) {
    const double position = 10.0 + static_cast<double>(r % 2);
    EXPECT_NEAR(at(x, r, 0), std::cos(position), 4 * epsilon);
    EXPECT_NEAR(at(x, r, 2), std::sin(position), 4 * epsilon);
    EXPECT_NEAR(at(x, r, 5), std::cos(position / 100), 4 * epsilon);  // theta^(-2/4)
    EXPECT_NEAR(at(x, r, 7), std::sin(position / 100), 4 * epsilon);
    EXPECT_EQ(at(x, r, 1), 0);
    EXPECT_EQ(at(x, r, 4), 0);
  }
}

TEST_F(KernelsReference, RopeKeepsNormsAndItsInverseUndoesIt) {
  const Tensor original = random_strided(arena, 6, 12, 1);
  const Framed x = framed(6, 12, 0.25);
  kernels->copy(original, x.view);
  const Tensor positions = integers(arena, {5, 6, 7, 5, 6, 7});
  kernels->rope(x.view, 6, positions, RopeTurns::plain(500, 6), false);
  for (std::int64_t r = 0; r < 6; ++r)
    for (std::int64_t head = 0; head < 12; head += 6) {
      const Tensor before = original.row_range(r, r + 1).column_range(head, head + 6);
      const Tensor after = x.view.row_range(r, r + 1).column_range(head, head + 6);
      EXPECT_NEAR(inner(after, after), inner(before, before), 32 * epsilon * inner(before, before));
    }
  // Orthogonal, so the inverse is the transpose: <R x, g> = <x, R' g> is what the backward pass needs.
  const Tensor g = random(arena, {6, 12}, 2), turned_back = clone(arena, g);
  kernels->rope(turned_back, 6, positions, RopeTurns::plain(500, 6), true);
  EXPECT_NEAR(inner(x.view, g), inner(original, turned_back), 512 * epsilon);
  kernels->rope(x.view, 6, positions, RopeTurns::plain(500, 6), true);
  expect_near(x.view, original, 16 * epsilon);
  x.expect_frame_untouched(0.25);
}

TEST_F(KernelsReference, RopeProductsDependOnTheDistanceAlone) {
  const Tensor q = random(arena, {1, 8}, 1), k = random(arena, {1, 8}, 2);
  const auto product = [&](std::int32_t m, std::int32_t n) {
    const Tensor turned_q = clone(arena, q), turned_k = clone(arena, k);
    kernels->rope(turned_q, 8, integers(arena, {m}), RopeTurns::plain(10000, 8), false);
    kernels->rope(turned_k, 8, integers(arena, {n}), RopeTurns::plain(10000, 8), false);
    return inner(turned_q, turned_k);
  };
  // A position of 1000 rounds its angle by 1000 eps.
  for (std::int32_t distance : {0, 1, 7}) {
    EXPECT_NEAR(product(distance, 0), product(distance + 3, 3), 64 * epsilon);
    EXPECT_NEAR(product(distance, 0), product(distance + 1000, 1000), 16 * 1000 * epsilon);
  }
  EXPECT_GT(std::abs(product(1, 0) - product(7, 0)), 1e-3);
}

TEST_F(KernelsReference, EmbeddingOfAPartOfTheVocabulary) {
  const std::int64_t first = 3, held = 4, width = 5;
  const std::vector<std::int32_t> ids{3, 2, 6, 7, 3, -1, 5};
  const Tensor ids_tensor = integers(arena, ids), table = random(arena, {held, width}, 1),
               y = unwritten({7, width});
  kernels->embedding(ids_tensor, table, first, y);
  for_each(y, [&](std::int64_t i, std::int64_t j) {
    const std::int64_t id = ids[static_cast<std::size_t>(i)];
    EXPECT_EQ(at(y, i, j), id >= first && id < first + held ? at(table, id - first, j) : 0.0);
  });
  const Tensor dy = random(arena, {7, width}, 2), dtable = random(arena, {held, width}, 3),
               before = clone(arena, dtable);
  kernels->embedding_backward(ids_tensor, dy, first, dtable);
  const auto loss = [&] {
    kernels->embedding(ids_tensor, table, first, y);
    return inner(y, dy);
  };
  expect_gradient(table, added(arena, dtable, before), loss, "dtable");
}

// -log softmax(logits)[target] in long double, with nothing shared with the kernels.
long double negative_log_softmax(const Tensor& logits, std::int64_t row, std::int64_t target) {
  long double sum = 0;
  for (std::int64_t j = 0; j < logits.cols(); ++j)
    sum += std::exp(static_cast<long double>(at(logits, row, j)));
  return std::log(sum) - at(logits, row, target);
}

struct CrossEntropy {
  double loss = 0;  // sum over the rows with a target
  Tensor dlogits;
};

// What the ranks of a tensor parallel group do together, the vocabulary cut into parts of these sizes.
CrossEntropy cross_entropy(Kernels& kernels, Arena& arena, const Tensor& logits,
                           const std::vector<std::int32_t>& ids, const std::vector<std::int64_t>& part_sizes,
                           double loss_scale, double cap = 0) {
  const std::int64_t rows = logits.rows();
  const Tensor targets = integers(arena, ids);
  const Tensor max = constant(arena, {rows}, -std::numeric_limits<double>::infinity());
  const Tensor sum = constant(arena, {rows}, 0), target = constant(arena, {rows}, 0);
  CrossEntropy result{0, clone(arena, logits)};

  const auto for_each_part = [&](const auto& body) {
    std::int64_t first = 0;
    for (std::int64_t size : part_sizes) {
      body(first, result.dlogits.column_range(first, first + size));
      first += size;
    }
  };
  for_each_part([&](std::int64_t, const Tensor& part) {
    if (cap > 0) kernels.soft_cap(part, cap);
    const Tensor part_max = constant(arena, {rows}, nan);
    kernels.row_max(part, part_max);
    for (std::int64_t i = 0; i < rows; ++i) at(max, 0, i) = std::max(at(max, 0, i), at(part_max, 0, i));
  });
  for_each_part([&](std::int64_t first, const Tensor& part) {
    const Tensor part_sum = constant(arena, {rows}, nan), part_target = constant(arena, {rows}, nan);
    kernels.exp_sum(part, max, targets, first, part_sum, part_target);
    kernels.add(part_sum, sum);
    kernels.add(part_target, target);
  });
  for (std::int64_t i = 0; i < rows; ++i)
    if (ids[static_cast<std::size_t>(i)] >= 0) result.loss += std::log(at(sum, 0, i)) - at(target, 0, i);
  for_each_part([&](std::int64_t first, const Tensor& part) {
    kernels.cross_entropy_backward(part, sum, targets, first, loss_scale, part, {cap, max});
  });
  return result;
}

// Each part with maxima of its own, as vocabulary parallelism over a pipeline makes them; one part has logits
// so low that its probabilities vanish.
TEST_F(KernelsReference, SoftmaxOfPartsMergesIntoTheWhole) {
  const std::vector<std::int32_t> ids{0, 10, -1, 4, 4, -100, 7};
  const std::int64_t rows = 7, width = 5, parts = 3;
  const std::vector<std::int64_t> bounds{0, 4, 5, 11};
  const Tensor logits = random(arena, {rows, 11}, 1), table = random(arena, {11, width}, 2);
  for (std::int64_t j = 5; j < 11; ++j) at(logits, 3, j) = -2000;
  const double scale = 0.125;
  const CrossEntropy whole = cross_entropy(*kernels, arena, logits, ids, {11}, scale);
  const Tensor dx = unwritten({rows, width});
  kernels->matmul(whole.dlogits, Transpose::no, table, Transpose::no, dx, false);

  const Tensor targets = integers(arena, ids), sums = unwritten({parts * 3 * rows});
  std::vector<Tensor> exponentials, means, of_targets, shares_of;
  for (std::int64_t p = 0; p < parts; ++p) {
    const std::int64_t first = bounds[p], end = bounds[p + 1];
    const Tensor e = clone(arena, logits).column_range(first, end);
    const auto of = [&](std::int64_t which) {
      return sums.flat_range((3 * p + which) * rows, (3 * p + which + 1) * rows);
    };
    kernels->row_max(e, of(0));
    kernels->exp_sum(e, of(0), targets, first, of(1), of(2));
    const Tensor probabilities = unwritten({rows, end - first}), mean = unwritten({rows, width}),
                 rows_of_targets = unwritten({rows, width});
    kernels->cross_entropy_backward(e, of(1), targets, 11, 1, probabilities);
    kernels->matmul(probabilities, Transpose::no, table.row_range(first, end), Transpose::no, mean, false);
    kernels->embedding(targets, table.row_range(first, end), first, rows_of_targets);
    exponentials.push_back(e);
    means.push_back(mean);
    of_targets.push_back(rows_of_targets);
  }
  const Tensor sum = unwritten({rows}), target = unwritten({rows}), scales = unwritten({parts * rows}),
               shares = unwritten({parts * rows}), merged = unwritten({rows, width});
  kernels->merge_softmax(sums, targets, bounds, sum, target, scales, shares);
  double loss = 0;
  for (std::int64_t i = 0; i < rows; ++i)
    if (ids[static_cast<std::size_t>(i)] >= 0) loss += std::log(at(sum, 0, i)) - at(target, 0, i);
  EXPECT_NEAR(loss, whole.loss, 64 * epsilon * whole.loss);
  for (std::int64_t p = 0; p < parts; ++p) {
    shares_of.push_back(shares.flat_range(p * rows, (p + 1) * rows));
    const Tensor d = unwritten({rows, bounds[p + 1] - bounds[p]});
    kernels->cross_entropy_backward(exponentials[p], scales.flat_range(p * rows, (p + 1) * rows), targets,
                                    bounds[p], scale, d);
    for_each(d, [&](std::int64_t i, std::int64_t j) {
      EXPECT_NEAR(at(d, i, j), at(whole.dlogits, i, bounds[p] + j), 16 * epsilon)
          << p << " " << i << " " << j;
    });
  }
  kernels->merge_gradients(means, shares_of, of_targets, targets, scale, merged);
  for_each(merged, [&](std::int64_t i, std::int64_t j) {
    EXPECT_NEAR(at(merged, i, j), at(dx, i, j), 64 * epsilon);
  });
  // One part is the whole.
  const Tensor one = unwritten({3 * rows}), e = clone(arena, logits);
  kernels->row_max(e, one.flat_range(0, rows));
  kernels->exp_sum(e, one.flat_range(0, rows), targets, 0, one.flat_range(rows, 2 * rows),
                   one.flat_range(2 * rows, 3 * rows));
  const Tensor same_scales = unwritten({rows}), same_shares = unwritten({rows});
  kernels->merge_softmax(one, targets, std::vector<std::int64_t>{0, 11}, sum, target, same_scales,
                         same_shares);
  for (std::int64_t i = 0; i < rows; ++i) {
    EXPECT_EQ(at(same_scales, 0, i), at(one, 0, rows + i));
    EXPECT_EQ(at(same_shares, 0, i), 1);
  }
}

TEST_F(KernelsReference, CrossEntropyWholeAndSplitOverTheVocabulary) {
  const double loss_scale = 0.125;
  const std::vector<std::int32_t> ids{0, 10, -1, 4, 4, -100, 7};
  const Tensor logits = random(arena, {7, 11}, 1);
  long double expected = 0;
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i] >= 0) expected += negative_log_softmax(logits, static_cast<std::int64_t>(i), ids[i]);

  const CrossEntropy whole = cross_entropy(*kernels, arena, logits, ids, {11}, loss_scale);
  EXPECT_NEAR(whole.loss, static_cast<double>(expected), 64 * epsilon);
  const auto loss = [&] { return loss_scale * cross_entropy(*kernels, arena, logits, ids, {11}, 1).loss; };
  expect_gradient(logits, whole.dlogits, loss, "dlogits");
  for (std::int64_t ignored : {2, 5})
    for (std::int64_t j = 0; j < 11; ++j) EXPECT_EQ(at(whole.dlogits, ignored, j), 0);

  const std::vector<std::vector<std::int64_t>> cuts{{4, 7}, {3, 6, 2}, {11, 0}};
  for (const auto& cut : cuts) {
    const CrossEntropy split = cross_entropy(*kernels, arena, logits, ids, cut, loss_scale);
    EXPECT_NEAR(split.loss, whole.loss, 64 * epsilon);
    expect_near(split.dlogits, whole.dlogits, 8 * epsilon);
  }
}

TEST_F(KernelsReference, CappedLogitsHaveTheirOwnGradient) {
  const std::vector<std::int32_t> ids{0, 10, -1, 4};
  const Tensor logits = random(arena, {4, 11}, 1);
  const double cap = 1.25;
  const CrossEntropy whole = cross_entropy(*kernels, arena, logits, ids, {11}, 1, cap);
  const Tensor bent = clone(arena, logits);
  for_each(bent,
           [&](std::int64_t i, std::int64_t j) { at(bent, i, j) = cap * std::tanh(at(bent, i, j) / cap); });
  long double expected = 0;
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i] >= 0) expected += negative_log_softmax(bent, static_cast<std::int64_t>(i), ids[i]);
  EXPECT_NEAR(whole.loss, static_cast<double>(expected), 64 * epsilon);
  const auto loss = [&] { return cross_entropy(*kernels, arena, logits, ids, {11}, 1, cap).loss; };
  expect_gradient(logits, whole.dlogits, loss, "dlogits");
  const CrossEntropy split = cross_entropy(*kernels, arena, logits, ids, {3, 6, 2}, 1, cap);
  expect_near(split.dlogits, whole.dlogits, 16 * epsilon);
}

TEST_F(KernelsReference, CrossEntropySurvivesLargeLogits) {
  const Tensor logits = constant(arena, {1, 3}, 1e4);
  at(logits, 0, 1) = -1e4;
  const CrossEntropy result = cross_entropy(*kernels, arena, logits, {0}, {3}, 1);
  EXPECT_NEAR(result.loss, std::log(2.0), 4 * epsilon);
  EXPECT_EQ(at(result.dlogits, 0, 1), 0);
}

TEST_F(KernelsReference, AdamWFollowsTheScalarFormula) {
  const AdamWStep settings{
      .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.1, .gradient_scale = 0.5};
  const std::int64_t count = 5;
  const Tensor p = random(arena, {count}, 1), m = constant(arena, {count}, 0),
               v = constant(arena, {count}, 0);
  const Tensor start = clone(arena, p);
  std::vector<Tensor> gradients;
  for (std::int64_t t = 1; t <= 6; ++t) {
    gradients.push_back(random(arena, {count}, static_cast<std::uint64_t>(10 + t)));
    AdamWStep step = settings;
    step.step = t;
    kernels->adamw(p, gradients.back(), m, v, step);
    for (std::int64_t i = 0; i < count; ++i) {
      // From the start each time, the moments as the weighted sums that the recurrence unrolls to.
      long double weight = at(start, 0, i);
      for (std::int64_t n = 1; n <= t; ++n) {
        long double first = 0, second = 0;
        for (std::int64_t k = 1; k <= n; ++k) {
          const long double g = 0.5L * at(gradients[static_cast<std::size_t>(k - 1)], 0, i);
          first += 0.1L * std::pow(0.9L, static_cast<long double>(n - k)) * g;
          second += 0.01L * std::pow(0.99L, static_cast<long double>(n - k)) * g * g;
        }
        const long double mean = first / (1 - std::pow(0.9L, static_cast<long double>(n)));
        const long double square = second / (1 - std::pow(0.99L, static_cast<long double>(n)));
        weight -= 0.01L * 0.1L * weight;
        weight -= 0.01L * mean / (std::sqrt(square) + 1e-6L);
        if (n == t) {
          EXPECT_NEAR(at(m, 0, i), static_cast<double>(first), 16 * epsilon);
          EXPECT_NEAR(at(v, 0, i), static_cast<double>(second), 16 * epsilon);
        }
      }
      EXPECT_NEAR(at(p, 0, i), static_cast<double>(weight), 64 * epsilon) << "step " << t;
    }
  }
}

TEST_F(KernelsReference, ABrokenCallNamesTheKernelAndItsTensors) {
  const Tensor x = constant(arena, {2, 3}, 1), y = constant(arena, {4, 6}, 1).column_range(1, 4);
  const auto said = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const InvariantError& error) {
      return error.what();
    }
    return "nothing";
  };
  EXPECT_EQ(said([&] { kernels->add(x, y); }),
            "internal error: add: x and y differ; called with f64 [2, 3] f64 [4, 3] of rows 6 apart");
  EXPECT_EQ(said([&] { kernels->bias_gradient(x, Tensor()); }),
            "internal error: bias_gradient: dbias is no wide row of dy; called with f64 [2, 3] (undefined)");
  EXPECT_EQ(said([&] {
              kernels->copy(integers(arena, {1, 2}), x);
            }),
            "internal error: copy: from and to differ; called with i32 [2] f64 [2, 3]");
  // A vector of rows that are apart is no vector.
  EXPECT_NE(said([&] { kernels->add_bias(constant(arena, {3, 2}, 1).column_range(0, 1), x); }), "nothing");
}

// What a dry run calls: checked like any call, and computed by nobody.
TEST_F(KernelsReference, KernelsOfNoDeviceCheckAndComputeNothing) {
  Arena none(Device::none);
  const auto dry = make_kernels(none, DType::f64, 4);
  const Tensor x(none, MemoryCategory::other, DType::f64, {4, 4}),
      short_of(none, MemoryCategory::other, DType::f64, {3});
  EXPECT_THROW(dry->add(x, short_of), InvariantError);
  dry->matmul(x, Transpose::no, x, Transpose::yes, x, true);
  dry->residual(x, x, {}, x);
  EXPECT_TRUE(dry->all_finite(x));
  // The reference kernels have no tensors to read there.
  EXPECT_THROW(kernels->scale(x, 2), InvariantError);
}

TEST_F(KernelsReference, BrokenShapesAndTypesAreInvariantErrors) {
  const Tensor x = random(arena, {2, 3}, 1), y = random(arena, {3, 2}, 2), ids = integers(arena, {0, 1});
  const Tensor f32(arena, MemoryCategory::other, DType::f32, {2, 3});
  EXPECT_THROW(kernels->add(x, y), InvariantError);
  EXPECT_THROW(kernels->add(f32, x), InvariantError);
  EXPECT_THROW(kernels->add(Tensor(), x), InvariantError);
  EXPECT_THROW(kernels->fill(ids, 0), InvariantError);
  EXPECT_THROW(kernels->matmul(x, Transpose::no, x, Transpose::no, y, false), InvariantError);
  EXPECT_THROW(kernels->matmul(x, Transpose::no, y, Transpose::no, x, false), InvariantError);
  EXPECT_THROW(kernels->add_bias(x, y), InvariantError);
  EXPECT_THROW(kernels->gated(Activation::swiglu, x, y), InvariantError);
  EXPECT_THROW(kernels->rope(x, 3, integers(arena, {0, 1}), RopeTurns::plain(10000, 3), false),
               InvariantError);
  EXPECT_THROW(kernels->embedding(x, x, 0, x), InvariantError);
  EXPECT_THROW(kernels->adamw(x, x, x, x, {.step = 0}), InvariantError);
}

// One chain through every kernel in both types, from numbers that f32 holds exactly; every tensor is
// compared.
TEST_F(KernelsReference, F32AgreesWithF64) {
  const std::int64_t rows = 6, cols = 8;
  const auto run = [&](DType dtype) {
    std::vector<Tensor> made;
    const auto make = [&](std::vector<std::int64_t> shape) {
      Tensor t(arena, MemoryCategory::other, dtype, std::move(shape));
      const Philox numbers(9, Stream::test, made.size());
      for (std::int64_t i = 0; i < t.numel(); ++i) {
        const float value = static_cast<float>(numbers.uniform(static_cast<std::uint64_t>(i)) + 0.25);
        if (dtype == DType::f32)
          t.host<float>()[i] = value;
        else
          t.host<double>()[i] = value;
      }
      made.push_back(t);
      return t;
    };
    const Tensor x = make({rows, cols}), w = make({cols, cols}), bias = make({cols}), y = make({rows, cols});
    const Tensor stats = make({rows, 2}), rms = make({rows, 1}), dx = make({rows, cols}), dw = make({cols}),
                 db = make({cols});
    kernels->layer_norm(x, bias, bias, 1e-5, y, stats);
    kernels->layer_norm_backward_input(y, x, bias, stats, dx);
    kernels->layer_norm_backward_weight(y, x, stats, dw, db);
    kernels->rms_norm(x, bias, 1e-5, y, rms);
    kernels->rms_norm_backward_input(y, x, bias, rms, dx);
    kernels->rms_norm_backward_weight(y, x, rms, dw);
    const Tensor h = make({rows, cols}), half = make({rows, cols / 2}), dh = make({rows, cols});
    kernels->matmul(x, Transpose::no, w, Transpose::yes, h, false);
    kernels->activate(Activation::gelu, h, bias, y);
    kernels->activate_backward(Activation::gelu, h, dh);
    kernels->gated(Activation::swiglu, h, half);
    kernels->gated_backward(Activation::swiglu, h, half);
    kernels->rope(h, 4, integers(arena, {2, 3, 4, 2, 3, 4}), RopeTurns::plain(10000, 4), false);
    kernels->residual(h, x, bias, h);
    kernels->bias_gradient(h, dw);
    const AttentionShape shape{
        .batch = 2, .q_len = 3, .kv_len = 3, .num_heads = 2, .num_kv_heads = 1, .head_dim = 4};
    const Tensor k = make({rows, 4}), v = make({rows, 4}), out = make({rows, cols}), lse = make({12}),
                 delta = make({12}), dq = make({rows, cols}), dk = make({rows, 4}), dv = make({rows, 4});
    kernels->attention(x, k, v, shape, out, lse);
    kernels->attention_delta(out, x, shape, delta);
    kernels->attention_backward(x, k, v, x, lse, delta, shape, dq, dk, dv);
    const Tensor ids = integers(arena, {0, 7, 3, -1, 2, 3}), sum = make({rows}), target = make({rows}),
                 max = make({rows});
    kernels->embedding(ids, w, 0, y);
    kernels->embedding_backward(ids, y, 0, w);
    kernels->row_max(y, max);
    kernels->exp_sum(y, max, ids, 0, sum, target);
    kernels->cross_entropy_backward(y, sum, ids, 0, 0.5, y);
    const Tensor p = make({cols}), g = make({cols}), m = make({cols}), square = make({cols});
    kernels->adamw(p, g, m, square, {.lr = 0.1, .weight_decay = 0.1});
    EXPECT_TRUE(kernels->all_finite(y));
    return made;
  };
  const std::vector<Tensor> single = run(DType::f32), twice = run(DType::f64);
  ASSERT_EQ(single.size(), twice.size());
  for (std::size_t n = 0; n < single.size(); ++n) {
    const double* expected = twice[n].host<double>();
    const double size = std::sqrt(std::inner_product(expected, expected + twice[n].numel(), expected, 0.0));
    // Sums of 8 terms in a chain of some ten operations.
    const double tolerance = 10 * 0x1p-23 * std::sqrt(8.0) * std::max(1.0, size);
    for (std::int64_t i = 0; i < single[n].numel(); ++i)
      EXPECT_NEAR(single[n].host<float>()[i], expected[i], tolerance) << "tensor " << n << " element " << i;
  }
}

}  // namespace
}  // namespace echelon::kernels_reference_test
