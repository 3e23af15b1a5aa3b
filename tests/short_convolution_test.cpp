// A gated short convolution is what its formula says, position by position, and its gradients are
// derivatives.
#include <gtest/gtest.h>

#include <memory>

#include "tensor/kernels.h"
#include "tensor_checks.h"

namespace echelon::short_convolution_test {
namespace {

using namespace checks;

// Two sequences of eleven tokens, of which documents begin at 0, 3 and 4, and at 0 and 7.
struct Problem {
  static constexpr std::int64_t length = 11, rows = 22, width = 5;
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();
  SequenceRows sequences{2, length, {}};
  Tensor given, taps, y;

  Problem(std::int64_t kernel, bool documents) {
    if (documents)
      sequences.first_positions =
          integers(arena, {0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7});
    given = random_strided(arena, rows, 3 * width, 1);
    taps = random(arena, {width, kernel}, 2);
    y = constant(arena, {rows, width}, 0);
  }
  std::int64_t start(std::int64_t row) const {
    const Tensor& first = sequences.first_positions;
    return first.defined() ? first.host<std::int32_t>()[row] : 0;
  }
  void forward() { kernels->short_convolution(given, taps, sequences, y); }
};

TEST(ShortConvolution, ConvolvesWithinADocument) {
  for (const std::int64_t kernel : {2, 3, 4, 13})
    for (const bool documents : {false, true}) {
      Problem p(kernel, documents);
      p.forward();
      for_each(p.y, [&](std::int64_t row, std::int64_t c) {
        double sum = 0;
        for (std::int64_t before = 0; before < kernel; ++before)
          if (row % p.length - before >= p.start(row))
            sum += at(p.taps, c, kernel - 1 - before) * at(p.given, row - before, c) *
                   at(p.given, row - before, 2 * p.width + c);
        EXPECT_NEAR(at(p.y, row, c), at(p.given, row, p.width + c) * sum, 1e-14) << row << " of " << kernel;
      });
    }
}

TEST(ShortConvolution, GradientsAreDerivatives) {
  for (const std::int64_t kernel : {2, 3, 13})
    for (const bool documents : {false, true}) {
      Problem p(kernel, documents);
      const Tensor dy = random_strided(p.arena, p.rows, p.width, 3);
      const auto loss = [&] {
        p.forward();
        double sum = 0;
        for_each(p.y, [&](std::int64_t i, std::int64_t j) { sum += at(p.y, i, j) * at(dy, i, j); });
        return sum;
      };
      loss();
      const Tensor d_given = constant(p.arena, {p.rows, 3 * p.width}, 0),
                   again = constant(p.arena, {p.rows, p.width}, 0),
                   d_taps = constant(p.arena, {p.width, kernel}, 0);
      p.kernels->short_convolution_backward(p.given, p.taps, dy, p.sequences, d_given, again);
      p.kernels->short_convolution_backward_weight(p.given, dy, p.sequences, d_taps);
      for_each(p.y, [&](std::int64_t i, std::int64_t j) { EXPECT_EQ(at(again, i, j), at(p.y, i, j)); });
      const auto expect_derivative = [&](const char* what, const Tensor& value, const Tensor& gradient) {
        const double step = 1e-4;  // the loss is a polynomial of degree 3: of degree 1 in each number
        for_each(value, [&](std::int64_t i, std::int64_t j) {
          double& v = at(value, i, j);
          const double before = v;
          v = before + step;
          const double more = loss();
          v = before - step;
          const double less = loss();
          v = before;
          EXPECT_NEAR(at(gradient, i, j), (more - less) / (2 * step), 1e-10 * (1 + std::abs(more)))
              << what << i << " " << j;
        });
      };
      expect_derivative("given ", p.given, d_given);
      expect_derivative("taps ", p.taps, d_taps);
    }
}

// Gradients of weights are added up, of some rows after others.
TEST(ShortConvolution, AddsToTheGradientOfItsWeights) {
  Problem p(3, true);
  const Tensor dy = random(p.arena, {p.rows, p.width}, 3), whole = constant(p.arena, {p.width, 3}, 1),
               parts = constant(p.arena, {p.width, 3}, 1);
  p.kernels->short_convolution_backward_weight(p.given, dy, p.sequences, whole);
  for (std::int64_t begin = 0; begin < p.rows; begin += p.length)
    p.kernels->short_convolution_backward_weight(
        p.given.row_range(begin, begin + p.length), dy.row_range(begin, begin + p.length),
        {1, p.length, p.sequences.first_positions.flat_range(begin, begin + p.length)}, parts);
  for_each(whole,
           [&](std::int64_t i, std::int64_t j) { EXPECT_NEAR(at(whole, i, j), at(parts, i, j), 1e-13); });
}

}  // namespace
}  // namespace echelon::short_convolution_test
