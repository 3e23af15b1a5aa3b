// Sums over rows: gradients of biases and of norms' weights. A block sums some rows of a few runs of columns.
// Its lanes are side by side, in groups that each take every n-th row; the groups' sums are added in order.
// So the grouping of a sum depends only on the numbers of rows and lanes.
//
// A Term says what each column of a row adds to `sums` sums of numbers F:
//   static constexpr int columns, sums
//   bool is_aligned() const
//   term(row, Columns<n>, terms), F terms[sums][n], n = columns or 1
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tensor/rows/columns.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// Where sums go; each block's sums follow those of the block before by `stride`.
template <class Term>
struct ColumnTotals {
  typename Term::F* to[Term::sums];
  std::int64_t stride = 0;
};

// A block sums `chunk` rows. `add`: adds to what is there.
template <class Term>
struct ColumnSums {
  using F = typename Term::F;
  Term term;
  ColumnTotals<Term> totals;
  std::int64_t rows, cols, chunk;
  bool add;

  std::int64_t num_blocks(std::int64_t lanes) const {
    return blocks_across(lanes) * (chunk == 0 ? 1 : (rows + chunk - 1) / chunk);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return lanes == 1 ? 0 : sizeof(F) * static_cast<std::size_t>(Term::sums * Term::columns * lanes);
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t width = columns_across(team.lanes()), wide = blocks_across(team.lanes());
    const std::int64_t first = team.block() % wide * width, part = team.block() / wide;
    const std::int64_t begin = part * chunk, end = begin + chunk < rows ? begin + chunk : rows;
    if (team.lanes() == 1) {
      sum_columns<Team>(first, begin, end, 1,
                        [&](int s, std::int64_t column, F sum) { put(s, column, part, sum); });
      return;
    }
    F* const sums = reinterpret_cast<F*>(team.shared());  // [group][s][column of the block]
    const std::int64_t groups = row_groups(team.lanes()), group = team.lane() / (team.lanes() / groups);
    sum_columns<Team>(first + team.lane() % (team.lanes() / groups) * Term::columns, begin + group, end,
                      groups, [&](int s, std::int64_t column, F sum) {
                        sums[(group * Term::sums + s) * width + column - first] = sum;
                      });
    team.sync();
    for (std::int64_t at = team.lane(); at < width && first + at < cols; at += team.lanes())
      for (int s = 0; s < Term::sums; ++s) {
        F sum = sums[s * width + at];
        for (std::int64_t g = 1; g < groups; ++g) sum += sums[(g * Term::sums + s) * width + at];
        put(s, first + at, part, sum);
      }
  }

 private:
  // For 128 lanes: 8 groups of 16, which together read 256 bytes of a row.
  ECHELON_HOST_DEVICE static constexpr std::int64_t row_groups(std::int64_t lanes) {
    std::int64_t groups = 1;
    while (8 * groups * groups <= lanes && lanes % (2 * groups) == 0) groups *= 2;
    return groups;
  }
  ECHELON_HOST_DEVICE static constexpr std::int64_t columns_across(std::int64_t lanes) {
    return lanes / row_groups(lanes) * Term::columns;
  }
  ECHELON_HOST_DEVICE std::int64_t blocks_across(std::int64_t lanes) const {
    return (cols + columns_across(lanes) - 1) / columns_across(lanes);
  }

  ECHELON_HOST_DEVICE void put(int s, std::int64_t column, std::int64_t part, F sum) const {
    F& to = totals.to[s][part * totals.stride + column];
    to = add ? to + sum : sum;
  }
  // Calls store(s, column, sum) for the lane's columns from `column` on, summed over every step-th row.
  template <class Team, class Store>
  ECHELON_HOST_DEVICE void sum_columns(std::int64_t column, std::int64_t begin, std::int64_t end,
                                       std::int64_t step, const Store& store) const {
    const bool whole = !takes_one_column<Team> && term.is_aligned();
    visit_columns<Term::columns>(column, cols, whole, [&](auto at) {
      constexpr int n = decltype(at)::count;
      F sums[Term::sums][n] = {};
      const auto add_rows = [&](std::int64_t row, auto several) {
        F terms[several.value][Term::sums][n];  // all are read before the first is added
        for (int r = 0; r < several.value; ++r) term(row + r * step, at, terms[r]);
        for (int r = 0; r < several.value; ++r)
          for (int s = 0; s < Term::sums; ++s)
            for (int k = 0; k < n; ++k) sums[s][k] += terms[r][s][k];
      };
      constexpr std::integral_constant<int, 4> four;
      std::int64_t row = begin;
      for (; row + 3 * step < end; row += 4 * step) add_rows(row, four);
      for (; row < end; row += step) add_rows(row, std::integral_constant<int, 1>());
      for (int s = 0; s < Term::sums; ++s)
        for (int k = 0; k < n; ++k) store(s, at.begin + k, sums[s][k]);
    });
  }
};

// Terms of the second stage: the blocks' partial sums, one after another for each sum.
template <class Number, int num_sums>
struct PartsOfColumns {
  using F = Number;
  static constexpr int columns = columns_of<F>, sums = num_sums;
  Matrix<F> parts;
  std::int64_t cols;
  ECHELON_HOST_DEVICE bool is_aligned() const { return are_aligned<columns>(parts) && cols % columns == 0; }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at, F (&terms)[sums][N]) const {
    for (int s = 0; s < sums; ++s) {
      const auto of = at.read(parts[i] + s * cols);
      for (int k = 0; k < N; ++k) terms[s][k] = of[k];
    }
  }
};

}  // namespace echelon::rows
