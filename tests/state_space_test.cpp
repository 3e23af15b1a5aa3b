// The scan in chunks is the recurrence that it stands for, position by position, and its gradients are
// derivatives; in f32 and bf16, and in one lane or many, it is the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "tensor/kernels.h"
#include "tensor_checks.h"

namespace echelon::state_space_test {
namespace {

using namespace checks;

double silu(double x) { return x / (1 + std::exp(-x)); }

// Two sequences of eleven tokens, of which documents begin at 0, 3 and 4, and at 0 and 7.
struct Problem {
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();
  StateSpaceShape shape{{2, 11, {}}, 4, 3, 2, 5, 4};
  StateSpaceTensors in;
  Tensor x, taps, conv_bias, y, xbc;

  explicit Problem(bool documents) {
    if (documents)
      shape.rows.first_positions =
          integers(arena, {0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7});
    const std::int64_t rows = shape.rows.batch * shape.rows.length;
    x = random_strided(arena, rows, shape.mixed_width(), 1);
    taps = random(arena, {shape.mixed_width(), 3}, 2);
    conv_bias = random(arena, {shape.mixed_width()}, 3);
    xbc = constant(arena, {rows, shape.mixed_width()}, 0);
    y = constant(arena, {rows, shape.width()}, 0);
    in = {random_strided(arena, rows, shape.width(), 4),
          xbc,
          random_strided(arena, rows, shape.heads, 5),
          random(arena, {shape.heads}, 6),
          random(arena, {shape.heads}, 7),
          random(arena, {shape.heads}, 8)};
  }

  std::int64_t start(std::int64_t row) const {
    const Tensor& first = shape.rows.first_positions;
    return first.defined() ? first.host<std::int32_t>()[row] : 0;
  }
  Tensor room(bool backward) { return constant(arena, {shape.workspace(backward)}, std::nan("")); }
  void forward(const Tensor& state = {}) {
    kernels->convolve(x, taps, conv_bias, shape.rows, xbc);
    kernels->state_space(in, shape, room(false), state, y);
  }

  // y by the recurrence, of what was convolved.
  std::vector<double> expected() const {
    const std::int64_t P = shape.head_dim, N = shape.state, of_group = shape.heads / shape.groups;
    std::vector<double> all;
    std::vector<double> state(static_cast<std::size_t>(shape.width() * N));
    for (std::int64_t row = 0; row < y.rows(); ++row) {
      if (row % shape.rows.length == start(row)) std::fill(state.begin(), state.end(), 0.0);
      for (std::int64_t j = 0; j < shape.width(); ++j) {
        const std::int64_t h = j / P, b = shape.width() + h / of_group * N, c = b + shape.groups * N;
        const double step =
            std::log1p(std::exp(at(in.dt, row, h) + at(in.dt_bias.reshape({shape.heads, 1}), h)));
        const double decay = std::exp(-step * std::exp(at(in.a_log.reshape({shape.heads, 1}), h)));
        double sum = at(in.d.reshape({shape.heads, 1}), h) * at(xbc, row, j);
        for (std::int64_t n = 0; n < N; ++n) {
          double& s = state[static_cast<std::size_t>(j * N + n)];
          s = decay * s + step * at(xbc, row, j) * at(xbc, row, b + n);
          sum += s * at(xbc, row, c + n);
        }
        all.push_back(sum * silu(at(in.z, row, j)));
      }
    }
    return all;
  }
};

TEST(StateSpace, ConvolvesWithinADocument) {
  for (const bool documents : {false, true}) {
    Problem p(documents);
    p.forward();
    for_each(p.xbc, [&](std::int64_t row, std::int64_t c) {
      double u = at(p.conv_bias.reshape({p.conv_bias.numel(), 1}), c);
      for (std::int64_t k = 0; k < 3; ++k)
        if (row % 11 - 2 + k >= p.start(row)) u += at(p.taps, c, k) * at(p.x, row - 2 + k, c);
      EXPECT_NEAR(at(p.xbc, row, c), silu(u), 1e-14);
    });
  }
}

TEST(StateSpace, InChunksIsTheRecurrence) {
  for (const bool documents : {false, true})
    for (const std::int64_t chunk : {1, 3, 4, 11, 64}) {
      Problem p(documents);
      p.shape.chunk = chunk;
      p.forward();
      const std::vector<double> expected = p.expected();
      for_each(p.y, [&](std::int64_t row, std::int64_t j) {
        EXPECT_NEAR(at(p.y, row, j), expected[static_cast<std::size_t>(row * p.y.cols() + j)], 1e-12)
            << chunk << " " << row;
      });
    }
}

// One token, or some, at a time.
TEST(StateSpace, GoesOnFromAState) {
  Problem p(false);
  p.shape.rows = {1, 11, {}};
  const auto rows_of = [&](std::int64_t begin, std::int64_t end) {
    StateSpaceTensors in = p.in;
    in.z = in.z.row_range(begin, end), in.xbc = in.xbc.row_range(begin, end),
    in.dt = in.dt.row_range(begin, end);
    return in;
  };
  p.kernels->convolve(p.x.row_range(0, 11), p.taps, p.conv_bias, p.shape.rows, p.xbc.row_range(0, 11));
  const Tensor whole = constant(p.arena, {11, p.shape.width()}, 0),
               parts = constant(p.arena, whole.shape(), 0),
               state = constant(p.arena, {p.shape.width(), p.shape.state}, 0);
  p.kernels->state_space(rows_of(0, 11), p.shape, p.room(false), Tensor(), whole);
  for (std::int64_t begin = 0, end = 6; begin < 11; begin = end++) {
    p.shape.rows.length = end - begin;
    p.kernels->state_space(rows_of(begin, end), p.shape, p.room(false), state, parts.row_range(begin, end));
  }
  for_each(whole,
           [&](std::int64_t i, std::int64_t j) { EXPECT_NEAR(at(whole, i, j), at(parts, i, j), 1e-13); });
}

TEST(StateSpace, GradientsAreDerivatives) {  // long
  for (const bool documents : {false, true}) {
    Problem p(documents);
    const Tensor dy = random(p.arena, p.y.shape(), 9);
    const auto loss = [&] {
      p.forward();
      double sum = 0;
      for_each(p.y, [&](std::int64_t i, std::int64_t j) { sum += at(p.y, i, j) * at(dy, i, j); });
      return sum;
    };
    loss();
    const auto zeros = [&](const Tensor& t) { return constant(p.arena, {t.rows(), t.cols()}, 0); };
    const Tensor dz = zeros(p.in.z), dxbc = zeros(p.xbc), ddt = zeros(p.in.dt), dx = zeros(p.x),
                 dtaps = zeros(p.taps), terms = constant(p.arena, {p.y.rows(), 3 * p.shape.heads}, 0),
                 dbias = constant(p.arena, {p.shape.mixed_width()}, 0),
                 dheads = constant(p.arena, {3 * p.shape.heads}, 0);
    p.kernels->state_space_backward(p.in, p.shape, dy, p.room(true), {dz, dxbc, ddt, terms});
    p.kernels->convolve_backward(p.x, p.taps, p.conv_bias, p.shape.rows, dxbc, dx);
    p.kernels->convolve_backward_weight(p.x, dxbc, p.shape.rows, dtaps);
    p.kernels->bias_gradient(dxbc, dbias);
    p.kernels->bias_gradient(terms, dheads);
    const auto expect_derivative = [&](const char* what, const Tensor& value, const Tensor& gradient) {
      const double step = 1e-5;
      for_each(value, [&](std::int64_t i, std::int64_t j) {
        double& v = at(value, i, j);
        const double before = v;
        v = before + step;
        const double more = loss();
        v = before - step;
        const double less = loss();
        v = before;
        EXPECT_NEAR(at(gradient, i, j), (more - less) / (2 * step), 2e-8 * (1 + std::abs(more)))
            << what << i << " " << j;
      });
    };
    const auto column = [](const Tensor& t) { return t.reshape({t.numel(), 1}); };
    const std::int64_t heads = p.shape.heads;
    expect_derivative("z ", p.in.z, dz);
    expect_derivative("dt ", p.in.dt, ddt);
    expect_derivative("x ", p.x, dx);
    expect_derivative("taps ", p.taps, dtaps);
    expect_derivative("bias ", column(p.conv_bias), column(dbias));
    expect_derivative("dt_bias ", column(p.in.dt_bias), column(dheads.flat_range(0, heads)));
    expect_derivative("a_log ", column(p.in.a_log), column(dheads.flat_range(heads, 2 * heads)));
    expect_derivative("d ", column(p.in.d), column(dheads.flat_range(2 * heads, 3 * heads)));
  }
}

// Where decay is fast its gradient is that of a last rest, which f32 keeps where no larger sums are
// subtracted.
TEST(StateSpace, GradientsOfFastDecaysAreNoRoundingErrors) {
  for (const auto& [documents, chunk] : {std::pair{false, 4}, {true, 4}, {false, 11}})
    for (const double decay : {1.0, 20.0, 48.0}) {
      Problem p(documents);
      p.shape.chunk = chunk;
      const std::int64_t heads = p.shape.heads;
      p.kernels->convolve(p.x, p.taps, p.conv_bias, p.shape.rows, p.xbc);
      const Tensor dy = random(p.arena, p.y.shape(), 9);
      for_each(p.in.dt, [&](std::int64_t i, std::int64_t h) { at(p.in.dt, i, h) *= 0.1; });
      for (std::int64_t h = 0; h < heads; ++h) {
        p.in.dt_bias.host<double>()[h] = 0.5;  // steps of about 1
        p.in.a_log.host<double>()[h] = std::log(decay) + 0.02 * static_cast<double>(h);
      }
      const auto number = [](const Tensor& t, std::int64_t i, std::int64_t j) {
        return t.dtype() == DType::f64 ? at(t, i, j) : t.host<float>()[i * t.row_stride() + j];
      };
      const auto copy = [&](const Tensor& from, DType type) {
        const Tensor to(p.arena, MemoryCategory::other, type, from.shape());
        for_each(from, [&](std::int64_t i, std::int64_t j) {
          if (type == DType::f64)
            at(to, i, j) = number(from, i, j);
          else
            to.host<float>()[i * to.row_stride() + j] = static_cast<float>(number(from, i, j));
        });
        return to;
      };
      const auto gradients = [&](DType type) {
        const auto rounded = [&](const Tensor& t) { return copy(copy(t, DType::f32), type); };
        const StateSpaceTensors in{rounded(p.in.z),       rounded(p.in.xbc),   rounded(p.in.dt),
                                   rounded(p.in.dt_bias), rounded(p.in.a_log), rounded(p.in.d)};
        const auto zeros = [&](const Tensor& like) { return copy(constant(p.arena, like.shape(), 0), type); };
        const Tensor terms = zeros(constant(p.arena, {p.y.rows(), 3 * heads}, 0)), ddt = zeros(p.in.dt);
        p.kernels->state_space_backward(in, p.shape, rounded(dy), copy(p.room(true), type),
                                        {zeros(p.in.z), zeros(p.xbc), ddt, terms});
        return std::pair(copy(terms, DType::f64), copy(ddt, DType::f64));
      };
      const auto [terms, ddt] = gradients(DType::f32);
      const auto [exact_terms, exact_ddt] = gradients(DType::f64);
      for (std::int64_t h = 0; h < heads; ++h) {
        double largest = 0;
        for (std::int64_t t = 0; t < terms.rows(); ++t)
          largest = std::max(largest, std::abs(at(exact_terms, t, heads + h)));
        EXPECT_GT(largest, 0);
        for (std::int64_t t = 0; t < terms.rows(); ++t) {
          EXPECT_NEAR(at(terms, t, heads + h), at(exact_terms, t, heads + h), 1e-5 * largest)
              << decay << " row " << t << " head " << h;
          EXPECT_NEAR(at(ddt, t, h), at(exact_ddt, t, h), 1e-5 * (1 + std::abs(at(exact_ddt, t, h))))
              << decay << " row " << t << " head " << h;
        }
      }
    }
}

}  // namespace
}  // namespace echelon::state_space_test
