// LayerNorm (Ba 2016) and RMSNorm (Zhang & Sennrich 2019), as Kernels says them.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "tensor/rows/columns.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// A row's mean and what divides what is left of it.
template <class F>
struct Spread {
  F mean, rstd;
};

template <class Team, class T>
ECHELON_HOST_DEVICE Spread<Wide<T>> spread_of(const Team& team, const T* x, std::int64_t cols, Wide<T> eps) {
  using F = Wide<T>;
  const F columns = static_cast<F>(cols);
  F mean = 0, variance = 0;
  for (std::int64_t j = team.lane(); j < cols; j += team.lanes()) mean += x[j];
  mean = sum_of(team, mean) / columns;
  for (std::int64_t j = team.lane(); j < cols; j += team.lanes()) variance += (x[j] - mean) * (x[j] - mean);
  variance = sum_of(team, variance);
  return {mean, 1 / std::sqrt(variance / columns + eps)};
}

// A column's weight and bias; of a norm without them 1 and 0.
template <class T>
ECHELON_HOST_DEVICE Wide<T> weight_at(const T* w, std::int64_t j) {
  return w == nullptr ? Wide<T>(1) : Wide<T>(w[j]);
}
template <class T>
ECHELON_HOST_DEVICE Wide<T> bias_at(const T* b, std::int64_t j) {
  return b == nullptr ? Wide<T>(0) : Wide<T>(b[j]);
}

template <class T>
struct LayerNormAgain {
  Matrix<T> x;
  const T *w, *b;
  const Wide<T>* stats;
  Matrix<T> y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    y[i][j] = T((x[i][j] - stats[2 * i]) * stats[2 * i + 1] * weight_at(w, j) + bias_at(b, j));
  }
};

template <class T>
struct LayerNorm {
  Matrix<T> x;
  const T *w, *b;
  Wide<T> eps;
  Matrix<T> y;
  Wide<T>* stats;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const Spread<Wide<T>> row = spread_of(team, x[i], x.cols, eps);
    if (team.lane() == 0) stats[2 * i] = row.mean, stats[2 * i + 1] = row.rstd;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes())
      y[i][j] = T((x[i][j] - row.mean) * row.rstd * weight_at(w, j) + bias_at(b, j));
  }
};

// With n = (x - mean) rstd and g = dy w: dx += rstd (g - mean(g) - n mean(g n)).
template <class T>
struct LayerNormBackwardInput {
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* stats;
  Matrix<T> dx;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const F columns = static_cast<F>(x.cols), mean = stats[2 * i], rstd = stats[2 * i + 1];
    F mean_g = 0, mean_gn = 0;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes()) {
      mean_g += dy[i][j] * weight_at(w, j);
      mean_gn += dy[i][j] * weight_at(w, j) * (x[i][j] - mean) * rstd;
    }
    mean_g = sum_of(team, mean_g) / columns;
    mean_gn = sum_of(team, mean_gn) / columns;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes())
      dx[i][j] =
          T(dx[i][j] + rstd * (dy[i][j] * weight_at(w, j) - mean_g - (x[i][j] - mean) * rstd * mean_gn));
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
  Matrix<T> x;
  const T* w;
  const Wide<T>* rstd;
  Matrix<T> y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    y[i][j] = T(x[i][j] * rstd[i] * weight_at(w, j));
  }
};

template <class T>
struct RmsNorm {
  Matrix<T> x;
  const T* w;
  Wide<T> eps;
  Matrix<T> y;
  Wide<T>* rstd;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    F squares = 0;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes()) squares += x[i][j] * x[i][j];
    squares = sum_of(team, squares);
    const F of_row = 1 / std::sqrt(squares / static_cast<F>(x.cols) + eps);
    if (team.lane() == 0) rstd[i] = of_row;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes())
      y[i][j] = T(x[i][j] * of_row * weight_at(w, j));
  }
};

// With n = x rstd and g = dy w: dx += rstd (g - n mean(g n)).
template <class T>
struct RmsNormBackwardInput {
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* rstd;
  Matrix<T> dx;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    F mean_gn = 0;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes())
      mean_gn += dy[i][j] * weight_at(w, j) * x[i][j] * rstd[i];
    mean_gn = sum_of(team, mean_gn) / static_cast<F>(x.cols);
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes())
      dx[i][j] = T(dx[i][j] + rstd[i] * (dy[i][j] * weight_at(w, j) - x[i][j] * rstd[i] * mean_gn));
  }
};

// Of rows whose columns are cut over ranks: Kernels says what is added up in between.
template <class T>
struct RowSquares {
  Matrix<T> x;
  Wide<T>* squares;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    F sum = 0;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes()) sum += F(x[i][j]) * x[i][j];
    sum = sum_of(team, sum);
    if (team.lane() == 0) squares[i] = sum;
  }
};

template <class T>
struct RmsNormOfSquares {
  Matrix<T> x;
  const T* w;
  Wide<T> eps, columns;
  Matrix<T> y;
  Wide<T>* stats;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const Wide<T> of_row = 1 / std::sqrt(stats[i] / columns + eps);
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes()) y[i][j] = T(x[i][j] * of_row * w[j]);
    team.sync();  // all have read it
    if (team.lane() == 0) stats[i] = of_row;
  }
};

template <class T>
struct RmsNormBackwardSums {
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* rstd;
  Wide<T>* sums;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    Wide<T> sum = 0;
    for (std::int64_t j = team.lane(); j < x.cols; j += team.lanes())
      sum += dy[i][j] * w[j] * x[i][j] * rstd[i];
    sum = sum_of(team, sum);
    if (team.lane() == 0) sums[i] = sum;
  }
};

template <class T>
struct RmsNormBackwardInputOfSums {
  Matrix<T> dy, x;
  const T* w;
  const Wide<T>* rstd;
  const Wide<T>* sums;
  Wide<T> columns;
  Matrix<T> dx;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    const Wide<T> mean_gn = sums[i] / columns;
    dx[i][j] = T(dx[i][j] + rstd[i] * (dy[i][j] * w[j] - x[i][j] * rstd[i] * mean_gn));
  }
};

template <class T>
struct RmsNormWeightTerm {
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
  using F = Wide<T>;
  static constexpr int columns = columns_of<T>, sums = 1;
