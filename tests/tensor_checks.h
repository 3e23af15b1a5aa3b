// What the kernel tests share: f64 tensors of reproducible random numbers, and gradients checked by
// differences.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "tensor/tensor.h"

namespace echelon::checks {

inline constexpr double epsilon = std::numeric_limits<double>::epsilon();

// Row i, column j. InvariantError beyond the tensor.
inline double& at(const Tensor& t, std::int64_t i, std::int64_t j = 0) {
  check(i >= 0 && i < t.rows() && j >= 0 && j < t.cols(), "a test reads beyond a tensor");
  return t.host<double>()[i * t.row_stride() + j];
}

template <class Body>  // body(row, column)
void for_each(const Tensor& t, const Body& body) {
  for (std::int64_t i = 0; i < t.rows(); ++i)
    for (std::int64_t j = 0; j < t.cols(); ++j) body(i, j);
}

inline Tensor constant(Arena& arena, std::vector<std::int64_t> shape, double value) {
  Tensor t(arena, MemoryCategory::other, DType::f64, std::move(shape));
  for_each(t, [&](std::int64_t i, std::int64_t j) { at(t, i, j) = value; });
  return t;
}

// Standard normal numbers; `which` tells the tensors of a test apart.
inline Tensor random(Arena& arena, std::vector<std::int64_t> shape, std::uint64_t which) {
  Tensor t(arena, MemoryCategory::other, DType::f64, std::move(shape));
  const Philox numbers(7, Stream::test, which);
  for_each(t, [&](std::int64_t i, std::int64_t j) {
    at(t, i, j) = numbers.normal(static_cast<std::uint64_t>(i * t.cols() + j));
  });
  return t;
}

// The same, as a column range of a matrix that is wider on both sides.
inline Tensor random_strided(Arena& arena, std::int64_t rows, std::int64_t cols, std::uint64_t which) {
  return random(arena, {rows, cols + 5}, which).column_range(2, 2 + cols);
}

inline Tensor clone(Arena& arena, const Tensor& from) {
  Tensor t(arena, MemoryCategory::other, DType::f64, from.shape());
  for_each(t, [&](std::int64_t i, std::int64_t j) { at(t, i, j) = at(from, i, j); });
  return t;
}

inline Tensor integers(Arena& arena, const std::vector<std::int32_t>& values) {
  Tensor t(arena, MemoryCategory::other, DType::i32, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), t.host<std::int32_t>());
  return t;
}

inline double inner(const Tensor& x, const Tensor& y) {
  double sum = 0;
  for_each(x, [&](std::int64_t i, std::int64_t j) { sum += at(x, i, j) * at(y, i, j); });
  return sum;
}

inline void expect_near(const Tensor& x, const Tensor& y, double tolerance) {
  ASSERT_EQ(x.rows(), y.rows());
  ASSERT_EQ(x.cols(), y.cols());
  for_each(x, [&](std::int64_t i, std::int64_t j) {
    EXPECT_NEAR(at(x, i, j), at(y, i, j), tolerance) << "row " << i << " column " << j;
  });
}

// gradient = d loss() / dx, by central differences. With a step of cbrt(eps) the truncation error (step^2)
// and the rounding error (eps |loss| / step) are both of the order eps^(2/3); third derivatives here are of
// order ten.
template <class Loss>
void expect_gradient(const Tensor& x, const Tensor& gradient, const Loss& loss, const char* name) {
  ASSERT_EQ(x.numel(), gradient.numel());
  const double step = std::cbrt(epsilon);
  const double tolerance = 10 * step * step * (1 + std::abs(loss()));
  for_each(x, [&](std::int64_t i, std::int64_t j) {
    const double middle = at(x, i, j);
    at(x, i, j) = middle + step;
    const double above = loss();
    at(x, i, j) = middle - step;
    const double below = loss();
    at(x, i, j) = middle;
    EXPECT_NEAR(at(gradient, i, j), (above - below) / (2 * step), tolerance)
        << name << " row " << i << " column " << j;
  });
}

// For outputs that kernels accumulate into: what was added to `before`.
inline Tensor added(Arena& arena, const Tensor& after, const Tensor& before) {
  Tensor t = clone(arena, after);
  for_each(t, [&](std::int64_t i, std::int64_t j) { at(t, i, j) -= at(before, i, j); });
  return t;
}

}  // namespace echelon::checks
