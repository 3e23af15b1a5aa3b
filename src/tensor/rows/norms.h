// LayerNorm (Ba 2016) and RMSNorm (Zhang & Sennrich 2019), as specified in Kernels.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "tensor/rows/columns.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// A row's mean, and the factor for its deviations.
template <class F>
struct Spread {
  F mean, rstd;
};

template <class Mine, class Row, class Team, class F>
ECHELON_HOST_DEVICE Spread<F> spread_of(const Team& team, const Mine& mine, const Row& x, std::int64_t cols,
                                        F eps) {
  const F columns = static_cast<F>(cols);
  F mean = 0, variance = 0;
  mine.each([&](auto at, int place) {
    const auto of = x.at(at, place);
    for (int k = 0; k < at.count; ++k) mean += of[k];
  });
  mean = sum_of(team, mean) / columns;
  mine.each([&](auto at, int place) {
    const auto of = x.at(at, place);
    for (int k = 0; k < at.count; ++k) variance += (of[k] - mean) * (of[k] - mean);
  });
  variance = sum_of(team, variance);
  return {mean, 1 / std::sqrt(variance / columns + eps)};
}

// A norm without weights and biases has 1 and 0.

template <class T>
struct LayerNormAgain {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  const T *w, *b;
  const Wide<T>* stats;
  Matrix<T> y;
  bool is_aligned() const { return are_aligned<columns>(x, w, b, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto of = at.read(x[i]), weight = at.read_or(w, 1), bias = at.read_or(b, 0);
    const Wide<T> mean = stats[2 * i], rstd = stats[2 * i + 1];
    at.write(y[i], [&](int k) { return (of[k] - mean) * rstd * weight[k] + bias[k]; });
  }
};

template <class T>
struct LayerNorm {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  const T *w, *b;
  Wide<T> eps;
  Matrix<T> y;
  Wide<T>* stats;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const LaneColumns<Team, columns> mine(team, x.cols, are_aligned<columns>(x, w, b, y));
    const KeptRow<Team, T, columns> row(mine, x[i]);
    const Spread<Wide<T>> spread = spread_of(team, mine, row, x.cols, eps);
    if (team.lane() == 0) stats[2 * i] = spread.mean, stats[2 * i + 1] = spread.rstd;
    mine.each([&](auto at, int place) {
      const auto of = row.at(at, place);
      const auto weight = at.read_or(w, 1), bias = at.read_or(b, 0);
      at.write(y[i], [&](int k) { return (of[k] - spread.mean) * spread.rstd * weight[k] + bias[k]; });
    });
  }
};

// With n = (x - mean) rstd and g = dy w: dx += rstd (g - mean(g) - n mean(g n)).
template <class T>
struct LayerNormBackwardInput {
  static constexpr int columns = columns_of<T>;
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* stats;
  Matrix<T> dx;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const LaneColumns<Team, columns> mine(team, x.cols, are_aligned<columns>(dy, x, w, dx));
    const KeptRow<Team, T, columns> gradients(mine, dy[i]), row(mine, x[i]), sums(mine, dx[i]);
    const F num_columns = static_cast<F>(x.cols), mean = stats[2 * i], rstd = stats[2 * i + 1];
    F mean_g = 0, mean_gn = 0;
    mine.each([&](auto at, int place) {
      const auto d = gradients.at(at, place), of = row.at(at, place), weight = at.read_or(w, 1);
      for (int k = 0; k < at.count; ++k) {
        mean_g += d[k] * weight[k];
        mean_gn += d[k] * weight[k] * (of[k] - mean) * rstd;
      }
    });
    mean_g = sum_of(team, mean_g) / num_columns;
    mean_gn = sum_of(team, mean_gn) / num_columns;
    mine.each([&](auto at, int place) {
      const auto d = gradients.at(at, place), of = row.at(at, place), to = sums.at(at, place);
      const auto weight = at.read_or(w, 1);
      at.write(dx[i], [&](int k) {
        return to[k] + rstd * (d[k] * weight[k] - mean_g - (of[k] - mean) * rstd * mean_gn);
      });
    });
  }
};

// The terms of dw and db.
template <class T>
struct LayerNormWeightTerms {
  using F = Wide<T>;
  static constexpr int columns = columns_of<T>, sums = 2;
  Matrix<T> dy, x;
  const F* stats;
  ECHELON_HOST_DEVICE bool is_aligned() const { return are_aligned<columns>(dy, x); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at, F (&terms)[sums][N]) const {
    const auto d = at.read(dy[i]), of = at.read(x[i]);
    const F mean = stats[2 * i], rstd = stats[2 * i + 1];
    for (int k = 0; k < N; ++k) {
      terms[0][k] = d[k] * (of[k] - mean) * rstd;
      terms[1][k] = d[k];
    }
  }
};

template <class T>
struct RmsNormAgain {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  const T* w;
  const Wide<T>* rstd;
  Matrix<T> y;
  bool is_aligned() const { return are_aligned<columns>(x, w, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto of = at.read(x[i]), weight = at.read_or(w, 1);
    const Wide<T> of_row = rstd[i];
    at.write(y[i], [&](int k) { return of[k] * of_row * weight[k]; });
  }
};

template <class T>
struct RmsNorm {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  const T* w;
  Wide<T> eps;
  Matrix<T> y;
  Wide<T>* rstd;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const LaneColumns<Team, columns> mine(team, x.cols, are_aligned<columns>(x, w, y));
    const KeptRow<Team, T, columns> row(mine, x[i]);
    F squares = 0;
    mine.each([&](auto at, int place) {
      const auto of = row.at(at, place);
      for (int k = 0; k < at.count; ++k) squares += of[k] * of[k];
    });
    squares = sum_of(team, squares);
    const F of_row = 1 / std::sqrt(squares / static_cast<F>(x.cols) + eps);
    if (team.lane() == 0) rstd[i] = of_row;
    mine.each([&](auto at, int place) {
      const auto of = row.at(at, place);
      const auto weight = at.read_or(w, 1);
      at.write(y[i], [&](int k) { return of[k] * of_row * weight[k]; });
    });
  }
};

// With n = x rstd and g = dy w: dx += rstd (g - n mean(g n)).
template <class T>
struct RmsNormBackwardInput {
  static constexpr int columns = columns_of<T>;
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* rstd;
  Matrix<T> dx;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const LaneColumns<Team, columns> mine(team, x.cols, are_aligned<columns>(dy, x, w, dx));
    const KeptRow<Team, T, columns> gradients(mine, dy[i]), row(mine, x[i]), sums(mine, dx[i]);
    const F of_row = rstd[i];
    F mean_gn = 0;
    mine.each([&](auto at, int place) {
      const auto d = gradients.at(at, place), of = row.at(at, place), weight = at.read_or(w, 1);
      for (int k = 0; k < at.count; ++k) mean_gn += d[k] * weight[k] * of[k] * of_row;
    });
    mean_gn = sum_of(team, mean_gn) / static_cast<F>(x.cols);
    mine.each([&](auto at, int place) {
      const auto d = gradients.at(at, place), of = row.at(at, place), to = sums.at(at, place);
      const auto weight = at.read_or(w, 1);
      at.write(dx[i], [&](int k) { return to[k] + of_row * (d[k] * weight[k] - of[k] * of_row * mean_gn); });
    });
  }
};

// For rows whose columns are cut over ranks: Kernels says what is summed over the ranks in between.
template <class T>
struct RowSquares {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  Wide<T>* squares;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const LaneColumns<Team, columns> mine(team, x.cols, are_aligned<columns>(x));
    const KeptRow<Team, T, columns> row(mine, x[i]);
    F sum = 0;
    mine.each([&](auto at, int place) {
      const auto of = row.at(at, place);
      for (int k = 0; k < at.count; ++k) sum += F(of[k]) * of[k];
    });
    sum = sum_of(team, sum);
    if (team.lane() == 0) squares[i] = sum;
  }
};

template <class T>
struct RmsNormOfSquares {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  const T* w;
  Wide<T> eps, all_columns;
  Matrix<T> y;
  Wide<T>* stats;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const LaneColumns<Team, columns> mine(team, x.cols, are_aligned<columns>(x, w, y));
    const Wide<T> of_row = 1 / std::sqrt(stats[i] / all_columns + eps);
    mine.each([&](auto at, int) {
      const auto of = at.read(x[i]), weight = at.read(w);
      at.write(y[i], [&](int k) { return of[k] * of_row * weight[k]; });
    });
    team.sync();  // all lanes have read it
    if (team.lane() == 0) stats[i] = of_row;
  }
};

template <class T>
struct RmsNormBackwardSums {
  static constexpr int columns = columns_of<T>;
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* rstd;
  Wide<T>* sums;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const LaneColumns<Team, columns> mine(team, x.cols, are_aligned<columns>(dy, x, w));
    const KeptRow<Team, T, columns> gradients(mine, dy[i]), row(mine, x[i]);
    const Wide<T> of_row = rstd[i];
    Wide<T> sum = 0;
    mine.each([&](auto at, int place) {
      const auto d = gradients.at(at, place), of = row.at(at, place), weight = at.read(w);
      for (int k = 0; k < at.count; ++k) sum += d[k] * weight[k] * of[k] * of_row;
    });
    sum = sum_of(team, sum);
    if (team.lane() == 0) sums[i] = sum;
  }
};

template <class T>
struct RmsNormBackwardInputOfSums {
  static constexpr int columns = columns_of<T>;
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* rstd;
  const Wide<T>* sums;
  Wide<T> all_columns;
  Matrix<T> dx;
  bool is_aligned() const { return are_aligned<columns>(dy, x, w, dx); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const auto d = at.read(dy[i]), of = at.read(x[i]), weight = at.read(w), to = at.read(dx[i]);
    const Wide<T> mean_gn = sums[i] / all_columns, of_row = rstd[i];
    at.write(dx[i], [&](int k) { return to[k] + of_row * (d[k] * weight[k] - of[k] * of_row * mean_gn); });
  }
};

template <class T>
struct RmsNormWeightTerm {
  using F = Wide<T>;
  static constexpr int columns = columns_of<T>, sums = 1;
  Matrix<T> dy, x;
  const F* rstd;
  ECHELON_HOST_DEVICE bool is_aligned() const { return are_aligned<columns>(dy, x); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at, F (&terms)[sums][N]) const {
    const auto d = at.read(dy[i]), of = at.read(x[i]);
    for (int k = 0; k < N; ++k) terms[0][k] = d[k] * of[k] * rstd[i];
  }
};

}  // namespace echelon::rows
