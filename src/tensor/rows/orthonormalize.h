// Makes rows orthonormal (tensor/orthonormalize.h), in one block. Each lane keeps the same elements of every
// row throughout, and gets only sums of the others'. F is float or double.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/philox_words.h"
#include "tensor/rows/check_anywhere.h"
#include "tensor/rows/codecs.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

template <class F>
struct OrthonormalizeRows {
  F* x;
  std::int64_t rows, cols;
  PhiloxKey fresh;
  double dependent;  // a row that keeps no more of its length depends on those above it

  static OrthonormalizeRows of(F* x, std::int64_t rows, std::int64_t cols, const PhiloxKey& fresh) {
    // What remains of a dependent row is rounding errors of two passes over up to `rows` rows.
    return {
        x, rows, cols, fresh,
        4 * static_cast<double>(std::numeric_limits<F>::epsilon()) * std::sqrt(static_cast<double>(rows))};
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      F* const row = x + i * cols;
      std::int64_t drawn = 0;
      while (!normalize(team, row) || project(team, i) <= dependent) {
        check_anywhere(drawn < 8, "no direction is left for a row");
        const std::int64_t first = (drawn++ * rows + i) * cols;
        each_own(team, [&](std::int64_t c) {
          row[c] = static_cast<F>(philox_normal(fresh, static_cast<std::uint64_t>(first + c)));
        });
      }
      normalize(team, row);
    }
  }

 private:
  static constexpr int run = 8;  // consecutive elements of a lane

  template <class Team, class Body>
  ECHELON_HOST_DEVICE void each_own(const Team& team, const Body& body) const {
    const std::int64_t whole = cols / run;
    for (std::int64_t at = team.lane(); at < whole; at += team.lanes())
      for (int j = 0; j < run; ++j) body(at * run + j);
    if (team.lane() == 0)
      for (std::int64_t c = whole * run; c < cols; ++c) body(c);
  }

  // In double, in eight running sums per lane: the order of additions depends only on the length and the
  // number of lanes.
  template <class Team>
  ECHELON_HOST_DEVICE double dot(const Team& team, const F* a, const F* b) const {
    double sums[run] = {};
    const std::int64_t whole = cols / run;
    for (std::int64_t at = team.lane(); at < whole; at += team.lanes())
      for (int j = 0; j < run; ++j)
        sums[j] += static_cast<double>(a[at * run + j]) * static_cast<double>(b[at * run + j]);
    if (team.lane() == 0)
      for (std::int64_t c = whole * run; c < cols; ++c)
        sums[0] += static_cast<double>(a[c]) * static_cast<double>(b[c]);
    double sum = 0;
    for (const double part : sums) sum += part;
    return sum_of(team, sum);
  }

  template <class Team>
  ECHELON_HOST_DEVICE void divide(const Team& team, F* row, double by) const {
    each_own(team, [&](std::int64_t c) { row[c] = static_cast<F>(static_cast<double>(row[c]) / by); });
  }

  // Scales the row to length one; false if it is zero. Divides by the largest element first, so that no
  // square over- or underflows.
  template <class Team>
  ECHELON_HOST_DEVICE bool normalize(const Team& team, F* row) const {
    constexpr auto least = static_cast<double>(std::numeric_limits<F>::min());
    MagnitudeBits<F> most = 0;
    each_own(team, [&](std::int64_t c) { most = Larger()(most, magnitude_bits(row[c])); });
    const auto largest = static_cast<double>(std::bit_cast<F>(largest_of(team, most)));
    if (largest < least) return false;
    divide(team, row, largest);
    divide(team, row, std::sqrt(dot(team, row, row)));
    return true;
  }

  // Subtracts from row i, of length one, its projection on each row above: modified Gram-Schmidt, twice,
  // because after one pass an error of eps is large compared with what is left of a nearly dependent row
  // (Giraud et al. 2005, https://doi.org/10.1007/s00211-005-0615-4). Returns the length that is left.
  template <class Team>
  ECHELON_HOST_DEVICE double project(const Team& team, std::int64_t i) const {
    F* const row = x + i * cols;
    for (int pass = 0; pass < 2; ++pass)
      for (std::int64_t j = 0; j < i; ++j) {
        const F* const above = x + j * cols;
        const double along = dot(team, row, above);
        each_own(team, [&](std::int64_t c) {
          row[c] = static_cast<F>(static_cast<double>(row[c]) - along * static_cast<double>(above[c]));
        });
      }
    return std::sqrt(dot(team, row, row));
  }
};

}  // namespace echelon::rows
