// Passes over elements. T is the stored type, Wide<T> the type of the computation; T(...) is where an output
// is rounded.
#pragma once

#include <cmath>
#include <type_traits>

#include "base/bf16.h"
#include "tensor/rows/columns.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

template <class T>
struct Fill {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  T value;
  bool is_aligned() const { return are_aligned<columns>(x); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    at.write(x[i], [&](int) { return value; });
  }
};

template <class X, class Y>
struct Copy {
  static constexpr int columns = columns_of<X, Y>;
  Matrix<X> x;
  Matrix<Y> y;
  bool is_aligned() const { return are_aligned<columns>(x, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto from = at.read(x[i]);
    if constexpr (std::is_same_v<X, Y>)
      at.write(y[i], from);
    else
      at.write(y[i], [&](int k) { return from[k]; });
  }
};

template <class X, class Y>
struct Add {
  static constexpr int columns = columns_of<X, Y>;
  Matrix<X> x;
  Matrix<Y> y;
  bool is_aligned() const { return are_aligned<columns>(x, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto added = at.read(x[i]);
    const auto to = at.read(y[i]);
    at.write(y[i], [&](int k) { return to[k] + added[k]; });
  }
};

template <class T>
struct Scale {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  Wide<T> factor;
  bool is_aligned() const { return are_aligned<columns>(x); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto of = at.read(x[i]);
    at.write(x[i], [&](int k) { return of[k] * factor; });
  }
};

template <class T>
struct AddBias {
  static constexpr int columns = columns_of<T>;
  Matrix<T> y;
  const T* bias;
  bool is_aligned() const { return are_aligned<columns>(y, bias); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto to = at.read(y[i]), added = at.read(bias);
    at.write(y[i], [&](int k) { return to[k] + added[k]; });
  }
};

template <class T>
struct Residual {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x, y;
  const T* bias;  // or null
  Matrix<T> out;
  bool is_aligned() const { return are_aligned<columns>(x, y, bias, out); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto from = at.read(x[i]), added = at.read(y[i]);
    const auto sum = [&](int k) -> Wide<T> { return from[k] + added[k]; };
    if (bias == nullptr) {
      at.write(out[i], sum);
    } else {
      const auto b = at.read(bias);
      at.write(out[i], [&](int k) { return sum(k) + b[k]; });
    }
  }
};

// A term of a bias's gradient.
template <class T>
struct Element {
  using F = Wide<T>;
  static constexpr int columns = columns_of<T>, sums = 1;
  Matrix<T> x;
  ECHELON_HOST_DEVICE bool is_aligned() const { return are_aligned<columns>(x); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at, F (&terms)[sums][N]) const {
    const auto of = at.read(x[i]);
    for (int k = 0; k < N; ++k) terms[0][k] = of[k];
  }
};

// sums[row] = the sum of the squares of elements [row * each, (row + 1) * each) of `count`.
template <class T>
struct SumSquares {
  const T* x;
  std::int64_t count, each;
  double* sums;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t row) const {
    const std::int64_t end = (row + 1) * each < count ? (row + 1) * each : count;
    double sum = 0;
    for (std::int64_t i = row * each + team.lane(); i < end; i += team.lanes())
      sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    sum = sum_of(team, sum);
    if (team.lane() == 0) sums[row] = sum;
  }
};

// sums[i] = the sum of elements [i * each, (i + 1) * each) of `count`, in order: a sum for each lane.
struct SumInOrder {
  const double* x;
  std::int64_t count, each;
  double* sums;
  std::int64_t num_blocks(std::int64_t lanes) const { return (num_sums() + lanes - 1) / lanes; }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t i = team.block() * team.lanes() + team.lane();
    if (i >= num_sums()) return;
    const std::int64_t end = (i + 1) * each < count ? (i + 1) * each : count;
    double sum = 0;
    for (std::int64_t k = i * each; k < end; ++k) sum += x[k];
    sums[i] = sum;
  }

 private:
  ECHELON_HOST_DEVICE std::int64_t num_sums() const { return (count + each - 1) / each; }
};

// Measures for LargestOfRow: the magnitude of a number, or whether it is finite.
struct Magnitude {
  ECHELON_HOST_DEVICE double operator()(double x) const { return std::fabs(x); }
};
struct NotFinite {
  ECHELON_HOST_DEVICE double operator()(double x) const { return std::isfinite(x) ? 0 : 1; }
};
// The larger number; NaN if either is.
struct LargerOrNaN {
  ECHELON_HOST_DEVICE double operator()(double a, double b) const { return !(b <= a) && a == a ? b : a; }
};

// largest[row] = the largest measure(x), at least 0.
template <class T, class Measure>
struct LargestOfRow {
  Matrix<T> x;
  Measure measure;
  double* largest;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t row) const {
    double most = 0;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes())
      most = LargerOrNaN()(most, measure(static_cast<double>(x[row][j])));
    most = team.reduce(most, LargerOrNaN());
    if (team.lane() == 0) largest[row] = most;
  }
};

// The same for contiguous elements [row * each, (row + 1) * each) of `count`.
template <class T, class Measure>
struct LargestOfRun {
  const T* x;
  std::int64_t count, each;
  Measure measure;
  double* largest;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t row) const {
    const std::int64_t left = count - row * each, cols = left < each ? left : each;
    const LargestOfRow<const T, Measure> one{{x + row * each, 1, cols, cols}, measure, largest + row};
    one(team, 0);
  }
};

// The digits of x^2 scale (at most 1) in units of 2^-32 and 2^-64. See ExactSum.
struct ExactSquare {
  std::uint64_t high, low;
};
ECHELON_HOST_DEVICE inline ExactSquare exact_square(double x, double scale) {
  constexpr double unit = 4294967296.0;  // 2^32
  const double square = x * x * scale * unit;
  const auto high = static_cast<std::int64_t>(square);  // rounds towards zero
  return {static_cast<std::uint64_t>(high),
          static_cast<std::uint64_t>(static_cast<std::int64_t>((square - static_cast<double>(high)) * unit))};
}

// sums (rows, 2) = the high and the low sums over elements [row * each, (row + 1) * each) of `count`.
template <class T>
struct ExactSquares {
  const T* x;
  std::int64_t count, each;
  double scale;
  std::uint64_t* sums;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t row) const {
    const std::int64_t end = (row + 1) * each < count ? (row + 1) * each : count;
    std::uint64_t high = 0, low = 0;
    for (std::int64_t i = row * each + team.lane(); i < end; i += team.lanes()) {
      const ExactSquare square = exact_square(static_cast<double>(x[i]), scale);
      high += square.high;
      low += square.low;
    }
    high = sum_of(team, high);
    low = sum_of(team, low);
    if (team.lane() == 0) sums[2 * row] = high, sums[2 * row + 1] = low;
  }
};

// y += x for single numbers.
struct AddNumber {
  const double* x;
  double* y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t) const { *y += *x; }
};

}  // namespace echelon::rows
