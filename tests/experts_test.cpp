#include "tensor/expert_products.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tensor_checks.h"

namespace echelon::experts_test {
namespace {

using namespace checks;

constexpr std::int64_t C = 5, F = 4;

Weight weight(Arena& arena, std::vector<std::int64_t> shape, std::uint64_t which) {
  return {random(arena, shape, which), random(arena, shape, which + 50)};
}

// Runs of 3, 0, 1 and 4 rows, and two rows behind them.
struct ExpertsTest : testing::Test {
  ExpertsTest() {
    for (std::uint64_t e = 0; e < 4; ++e) {
      in.push_back(weight(arena, {2 * F, C}, 10 + e));
      out.push_back(weight(arena, {C, F}, 20 + e));
    }
  }
  static Tensor used(const Tensor& t) { return t.row_range(0, 8); }
  void forward(const Tensor& hidden, const Tensor& activated, const Tensor& y) {
    multiply(*kernels, in, Transpose::yes, bounds, x, hidden);
    kernels->gated(Activation::swiglu, used(hidden), used(activated));
    multiply(*kernels, out, Transpose::yes, bounds, activated, y);
  }
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();
  const ExpertBounds bounds{0, 3, 3, 4, 8};
  std::vector<Weight> in, out;
  Tensor x = random(arena, {10, C}, 1), weights = random(arena, {10, 1}, 2), dy = random(arena, {10, C}, 3);
};

TEST_F(ExpertsTest, ForwardIsThatOfEachMlpOnItsRows) {
  const Tensor hidden = constant(arena, {10, 2 * F}, 7), activated = constant(arena, {10, F}, 7),
               y = constant(arena, {10, C}, 7);
  forward(hidden, activated, y);
  for (std::size_t e = 0; e < 4; ++e) {
    const std::int64_t rows = bounds[e + 1] - bounds[e];
    const Tensor h = constant(arena, {rows, 2 * F}, 0), a = constant(arena, {rows, F}, 0),
                 expected = constant(arena, {rows, C}, 0);
    kernels->matmul(x.row_range(bounds[e], bounds[e + 1]), Transpose::no, in[e].value, Transpose::yes, h,
                    false);
    kernels->gated(Activation::swiglu, h, a);
    kernels->matmul(a, Transpose::no, out[e].value, Transpose::yes, expected, false);
    expect_near(y.row_range(bounds[e], bounds[e + 1]), expected, 0);
  }
  for (const Tensor& t : {hidden, activated, y})
    expect_near(t.row_range(8, 10), constant(arena, {2, t.cols()}, 7), 0);
}

TEST_F(ExpertsTest, GradientsAgreeWithDifferences) {
  const auto loss = [&] {
    const Tensor hidden = constant(arena, {10, 2 * F}, 0), activated = constant(arena, {10, F}, 0),
                 y = constant(arena, {10, C}, 0);
    forward(hidden, activated, y);
    for_each(y, [&](std::int64_t i, std::int64_t j) { at(y, i, j) *= at(weights, i); });
    return inner(y, dy);
  };
  std::vector<Tensor> in_before, out_before;
  for (std::size_t e = 0; e < 4; ++e) {
    in_before.push_back(clone(arena, in[e].gradient));
    out_before.push_back(clone(arena, out[e].gradient));
  }
  const Tensor hidden = constant(arena, {10, 2 * F}, 0), d_activated = constant(arena, {10, F}, 0),
               d_weights = constant(arena, {10, 1}, 0), dx = constant(arena, {10, C}, 0);
  multiply(*kernels, in, Transpose::yes, bounds, x, hidden);
  multiply(*kernels, out, Transpose::no, bounds, dy, d_activated);
  kernels->weighted_activation_backward(Activation::swiglu, used(hidden), used(d_activated), used(weights),
                                        used(d_weights));
  add_gradients(*kernels, out, bounds, d_activated, dy);
  multiply(*kernels, in, Transpose::no, bounds, hidden, dx);
  add_gradients(*kernels, in, bounds, x, hidden);
  expect_gradient(x, dx, loss, "x");
  expect_gradient(weights, d_weights, loss, "weights");
  for (std::size_t e = 0; e < 4; ++e) {
    expect_gradient(in[e].value, added(arena, in[e].gradient, in_before[e]), loss, "in");
    expect_gradient(out[e].value, added(arena, out[e].gradient, out_before[e]), loss, "out");
  }
  expect_near(in[1].gradient, in_before[1], 0);  // has no token: nothing was added
  expect_near(out[1].gradient, out_before[1], 0);
}

TEST_F(ExpertsTest, NoTokensAtAllAreNothing) {
  const ExpertBounds none(5, 0);
  const Tensor hidden = constant(arena, {10, 2 * F}, 7), before = clone(arena, in[0].gradient);
  multiply(*kernels, in, Transpose::yes, none, x, hidden);
  add_gradients(*kernels, in, none, x, hidden);
  expect_near(in[0].gradient, before, 0);
  expect_near(hidden, constant(arena, {10, 2 * F}, 7), 0);
}

// A copy of each token for each of its places, summed again: the adjoint of taking rows.
TEST_F(ExpertsTest, CombiningIsTheAdjointOfTakingRows) {
  const Tensor places = integers(arena, {3, 1, -1, 4, 2, 0}).reshape({3, 2}),
               tokens = integers(arena, {2, 0, 2, 0, 1});
  const Tensor v = random(arena, {3, C}, 30), w = random(arena, {5, C}, 31),
               taken = constant(arena, {5, C}, 0), combined = constant(arena, {3, C}, 9);
  kernels->embedding(tokens, v, 0, taken);
  kernels->combine_rows(w, places, {}, combined);
  EXPECT_NEAR(inner(taken, w), inner(v, combined), 100 * epsilon);
  const Tensor weighted = constant(arena, {3, C}, 9), factor = random(arena, {3, 2}, 32);
  kernels->combine_rows(w, places, factor, weighted);
  for (std::int64_t c = 0; c < C; ++c) {
    EXPECT_NEAR(at(weighted, 0, c), at(factor, 0, 0) * at(w, 3, c) + at(factor, 0, 1) * at(w, 1, c),
                8 * epsilon);
    EXPECT_EQ(at(weighted, 1, c), at(factor, 1, 1) * at(w, 4, c));
  }
}

}  // namespace
}  // namespace echelon::experts_test
