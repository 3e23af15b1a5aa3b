#include "tensor/orthonormalize.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "tensor/codecs.h"

namespace echelon {
namespace {

// In double, in eight running sums: what is added in which order depends on n alone.
template <class F>
double wide_dot(const F* x, const F* y, std::int64_t n) {
  constexpr std::int64_t lanes = 8;
  std::array<double, lanes> sums{};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (std::int64_t j = 0; j < lanes; ++j)
      sums[static_cast<std::size_t>(j)] += static_cast<double>(x[i + j]) * static_cast<double>(y[i + j]);
  for (; i < n; ++i) sums[0] += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  double sum = 0;
  for (double part : sums) sum += part;
  return sum;
}

template <class F>
void divide(F* x, double by, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = static_cast<F>(static_cast<double>(x[i]) / by);
}

// Scaled to length one; false where there is nothing to scale. By the largest element first, so that no
// square over- or underflows.
template <class F>
bool normalize(F* x, std::int64_t n) {
  const auto largest = static_cast<double>(largest_magnitude(x, n));
  if (largest < static_cast<double>(std::numeric_limits<F>::min())) return false;
  divide(x, largest, n);
  divide(x, std::sqrt(wide_dot(x, x, n)), n);
  return true;
}

// Takes from row i, of length one, its part along each row above: modified Gram-Schmidt, twice, because after
// once an error of eps is large beside what is left of a nearly dependent row (Giraud et al. 2005,
// https://doi.org/10.1007/s00211-005-0615-4). Returns what is left of its length.
template <class F>
double project(F* x, std::int64_t i, std::int64_t cols) {
  F* const row = x + i * cols;
  for (int pass = 0; pass < 2; ++pass)
    for (std::int64_t j = 0; j < i; ++j) {
      const F* const above = x + j * cols;
      const double along = wide_dot(row, above, cols);
      for (std::int64_t c = 0; c < cols; ++c)
        row[c] = static_cast<F>(static_cast<double>(row[c]) - along * static_cast<double>(above[c]));
    }
  return std::sqrt(wide_dot(row, row, cols));
}

}  // namespace

template <class F>
void orthonormalize_rows(F* x, std::int64_t rows, std::int64_t cols, const Philox& fresh) {
  check(rows <= cols, "more orthonormal rows than they have elements");
  // What a row that depends on those above leaves is the rounding of two passes over up to `rows` of them.
  const double dependent =
      4 * static_cast<double>(std::numeric_limits<F>::epsilon()) * std::sqrt(static_cast<double>(rows));
  for (std::int64_t i = 0; i < rows; ++i) {
    F* const row = x + i * cols;
    std::int64_t drawn = 0;
    while (!normalize(row, cols) || project(x, i, cols) <= dependent) {
      check(drawn < 8, "no direction is left for a row");
      const std::int64_t first = (drawn++ * rows + i) * cols;
      for (std::int64_t c = 0; c < cols; ++c)
        row[c] = static_cast<F>(fresh.normal(static_cast<std::uint64_t>(first + c)));
    }
    normalize(row, cols);
  }
}

template void orthonormalize_rows(float*, std::int64_t, std::int64_t, const Philox&);
template void orthonormalize_rows(double*, std::int64_t, std::int64_t, const Philox&);

}  // namespace echelon
