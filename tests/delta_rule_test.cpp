// The gated delta rule in chunks is the recurrence that it stands for, position by position, and its
// gradients are derivatives; in f32 both are near those of f64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "case_choice.h"
#include "tensor/kernels.h"
#include "tensor_checks.h"

namespace echelon::delta_rule_test {
namespace {

using namespace checks;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Two sequences of eleven tokens, of which documents begin at 0, 3 and 4, and at 0 and 7. `given` is what a
// convolution would have left; the rule works in a copy.
struct Problem {
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();
  StateSpaceShape shape{{2, 11, {}}, 4, 3, 2, 5, 4, true, 1e-2};
  StateSpaceTensors in;
  Tensor given, y;

  explicit Problem(bool documents) {
    if (documents)
      shape.rows.first_positions =
          integers(arena, {0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7});
    const std::int64_t rows = shape.rows.batch * shape.rows.length;
    given = random(arena, {rows, shape.mixed_width()}, 1);
    y = constant(arena, {rows, shape.width()}, 0);
    in = {random_strided(arena, rows, shape.width(), 4),
          constant(arena, given.shape(), 0),
          random_strided(arena, rows, shape.heads, 5),
          random(arena, {shape.heads}, 6),
          random(arena, {shape.heads}, 7),
          random(arena, {shape.head_dim}, 8),
          random_strided(arena, rows, shape.heads, 9)};
  }

  std::int64_t start(std::int64_t row) const {
    const Tensor& first = shape.rows.first_positions;
    return first.defined() ? first.host<std::int32_t>()[row] : 0;
  }
  Tensor room(bool backward) { return constant(arena, {shape.workspace(backward)}, std::nan("")); }
  void forward() {
    kernels->copy(given, in.xbc);
    kernels->state_space(in, shape, room(false), Tensor(), y);
  }
  void backward(const Tensor& dy, const StateSpaceGradients& out) {
    kernels->copy(given, in.xbc);
    kernels->state_space_backward(in, shape, dy, room(true), out);
  }

  // y by the recurrence.
  std::vector<double> expected() const {
    const std::int64_t P = shape.head_dim, N = shape.state, of_group = shape.heads / shape.groups;
    const auto of_head = [](const Tensor& t, std::int64_t h) { return t.host<double>()[h]; };
    std::vector<double> all;
    std::vector<double> state(static_cast<std::size_t>(shape.width() * N));
    for (std::int64_t row = 0; row < y.rows(); ++row) {
      if (row % shape.rows.length == start(row)) std::fill(state.begin(), state.end(), 0.0);
      for (std::int64_t h = 0; h < shape.heads; ++h) {
        const std::int64_t k = shape.width() + h / of_group * N, q = k + shape.groups * N;
        const auto unit = [&](std::int64_t begin) {
          double squares = 1e-6;
          std::vector<double> u;
          for (std::int64_t n = 0; n < N; ++n)
            squares += at(given, row, begin + n) * at(given, row, begin + n);
          for (std::int64_t n = 0; n < N; ++n) u.push_back(at(given, row, begin + n) / std::sqrt(squares));
          return u;
        };
        const std::vector<double> key = unit(k), query = unit(q);
        const double decay = std::exp(-std::exp(of_head(in.a_log, h)) *
                                      std::log1p(std::exp(at(in.dt, row, h) + of_head(in.dt_bias, h)))),
                     beta = sigmoid(at(in.beta, row, h));
        std::vector<double> o;
        double squares = 0;
        for (std::int64_t j = h * P; j < (h + 1) * P; ++j) {
          double* const s = &state[static_cast<std::size_t>(j * N)];
          double recalled = 0, sum = 0;
          for (std::int64_t n = 0; n < N; ++n)
            s[n] *= decay, recalled += s[n] * key[static_cast<std::size_t>(n)];
          for (std::int64_t n = 0; n < N; ++n) {
            const auto i = static_cast<std::size_t>(n);
            s[n] += beta * (at(given, row, j) - recalled) * key[i];
            sum += s[n] * query[i];
          }
          o.push_back(sum / std::sqrt(static_cast<double>(N)));
          squares += o.back() * o.back();
        }
        for (std::int64_t j = 0; j < P; ++j) {
          const double z = at(in.z, row, h * P + j);
          all.push_back(o[static_cast<std::size_t>(j)] /
                        std::sqrt(squares / static_cast<double>(P) + shape.norm_eps) * of_head(in.d, j) * z *
                        sigmoid(z));
        }
      }
    }
    return all;
  }
};

TEST(DeltaRule, InChunksIsTheRecurrence) {
  for (const bool documents : {false, true})
    for (const std::int64_t chunk : {1, 3, 4, 11, 64}) {
      Problem p(documents);
      p.shape.chunk = chunk;
      p.forward();
      const std::vector<double> expected = p.expected();
      for_each(p.y, [&](std::int64_t row, std::int64_t j) {
        EXPECT_NEAR(at(p.y, row, j), expected[static_cast<std::size_t>(row * p.y.cols() + j)], 1e-11)
            << chunk << " " << row;
      });
    }
}

// One token, or some, at a time.
TEST(DeltaRule, GoesOnFromAState) {
  Problem p(false);
  p.shape.rows = {1, 11, {}};
  const auto rows_of = [&](std::int64_t begin, std::int64_t end) {
    StateSpaceTensors in = p.in;
    for (Tensor StateSpaceTensors::*part :
         {&StateSpaceTensors::z, &StateSpaceTensors::xbc, &StateSpaceTensors::dt, &StateSpaceTensors::beta})
      in.*part = (in.*part).row_range(begin, end);
    return in;
  };
  const Tensor whole = constant(p.arena, {11, p.shape.width()}, 0),
               parts = constant(p.arena, whole.shape(), 0),
               state = constant(p.arena, {p.shape.width(), p.shape.state}, 0);
  p.kernels->copy(p.given, p.in.xbc);
  p.kernels->state_space(rows_of(0, 11), p.shape, p.room(false), Tensor(), whole);
  p.kernels->copy(p.given, p.in.xbc);
  for (std::int64_t begin = 0, end = 6; begin < 11; begin = end++) {
    p.shape.rows.length = end - begin;
    p.kernels->state_space(rows_of(begin, end), p.shape, p.room(false), state, parts.row_range(begin, end));
  }
  for_each(whole,
           [&](std::int64_t i, std::int64_t j) { EXPECT_NEAR(at(whole, i, j), at(parts, i, j), 1e-12); });
}

TEST(DeltaRule, GradientsAreDerivatives) {
  for (const bool documents : {false, true})
    for (const std::int64_t chunk : {4, 11}) {
      if (!is_taken(2)) continue;
      Problem p(documents);
      p.shape.chunk = chunk;
      const Tensor dy = random(p.arena, p.y.shape(), 10);
      const auto loss = [&] {
        p.forward();
        double sum = 0;
        for_each(p.y, [&](std::int64_t i, std::int64_t j) { sum += at(p.y, i, j) * at(dy, i, j); });
        return sum;
      };
      const auto zeros = [&](const Tensor& t) { return constant(p.arena, {t.rows(), t.cols()}, 0); };
      const StateSpaceGradients out{zeros(p.in.z), zeros(p.given), zeros(p.in.dt),
                                    constant(p.arena, {p.y.rows(), p.shape.terms()}, 0), zeros(p.in.beta)};
      p.backward(dy, out);
      const Tensor sums = constant(p.arena, {p.shape.terms()}, 0);
      p.kernels->bias_gradient(out.terms, sums);
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
          EXPECT_NEAR(at(gradient, i, j), (more - less) / (2 * step), 1e-7 * (1 + std::abs(more)))
              << what << i << " " << j;
        });
      };
      const auto column = [](const Tensor& t) { return t.reshape({t.numel(), 1}); };
      const std::int64_t heads = p.shape.heads;
      expect_derivative("z ", p.in.z, out.z);
      expect_derivative("dt ", p.in.dt, out.dt);
      expect_derivative("beta ", p.in.beta, out.beta);
      expect_derivative("values, keys, queries ", p.given, out.xbc);
      expect_derivative("dt_bias ", column(p.in.dt_bias), column(sums.flat_range(0, heads)));
      expect_derivative("a_log ", column(p.in.a_log), column(sums.flat_range(heads, 2 * heads)));
      expect_derivative("norm ", column(p.in.d), column(sums.flat_range(2 * heads, sums.numel())));
    }
}

// The system is triangular with ones, and what it takes out is at most what is there, as keys have length 1
// and betas are below 1: each of a chunk's rows adds some units of f32, so do norms of heads and the
// products, of at most as many terms as a state or a chunk has.
TEST(DeltaRule, IsRoundedByNoMoreThanItsSums) {
  for (const double decay : {0.01, 1.0, 20.0}) {
    Problem p(true);
    const Tensor dy = random(p.arena, p.y.shape(), 10);
    for (std::int64_t h = 0; h < p.shape.heads; ++h) p.in.a_log.host<double>()[h] = std::log(decay);
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
    const auto run = [&](DType type) {
      const auto rounded = [&](const Tensor& t) { return copy(copy(t, DType::f32), type); };
      StateSpaceTensors in{rounded(p.in.z),     rounded(p.given), rounded(p.in.dt),  rounded(p.in.dt_bias),
                           rounded(p.in.a_log), rounded(p.in.d),  rounded(p.in.beta)};
      const auto zeros = [&](const Tensor& like) { return copy(constant(p.arena, like.shape(), 0), type); };
      const Tensor y = zeros(p.y);
      p.kernels->state_space(in, p.shape, copy(p.room(false), type), Tensor(), y);
      in.xbc = rounded(p.given);
      const StateSpaceGradients out{zeros(p.in.z), zeros(p.given), zeros(p.in.dt),
                                    zeros(constant(p.arena, {p.y.rows(), p.shape.terms()}, 0)),
                                    zeros(p.in.beta)};
      p.kernels->state_space_backward(in, p.shape, rounded(dy), copy(p.room(true), type), out);
      std::vector<Tensor> all;
      for (const Tensor& t : {y, out.z, out.xbc, out.dt, out.terms, out.beta})
        all.push_back(copy(t, DType::f64));
      return all;
    };
    const std::vector<Tensor> rounded = run(DType::f32), exact = run(DType::f64);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      double largest = 0;
      for_each(exact[i], [&](std::int64_t t, std::int64_t j) {
        largest = std::max(largest, std::abs(at(exact[i], t, j)));
      });
      EXPECT_GT(largest, 0);
      for_each(exact[i], [&](std::int64_t t, std::int64_t j) {
        EXPECT_NEAR(at(rounded[i], t, j), at(exact[i], t, j), 200 * 6e-8 * (0.1 + largest))
            << decay << " tensor " << i << " row " << t << " column " << j;
      });
    }
  }
}

}  // namespace
}  // namespace echelon::delta_rule_test
