// LFM2's gated short convolution (https://arxiv.org/abs/2511.23404): for each channel c, y = C u, where u is
// a causal convolution of B x over a few positions of a document. Intermediate values are wide.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "tensor/rows/state_space.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// given (N, 3 C) is [B | C | x].
template <class T>
struct GatedChannels {
  using F = Wide<T>;
  Matrix<T> given;
  std::int64_t width;  // C
  RowsOfSequences sequences;

  ECHELON_HOST_DEVICE F b(std::int64_t row, std::int64_t c) const { return F(given[row][c]); }
  ECHELON_HOST_DEVICE F gate(std::int64_t row, std::int64_t c) const { return F(given[row][width + c]); }
  ECHELON_HOST_DEVICE F x(std::int64_t row, std::int64_t c) const { return F(given[row][2 * width + c]); }
  // Whether a row contributes to the sum of the row `behind` rows later (in the same document), and whether
  // it includes the row before.
  ECHELON_HOST_DEVICE bool reaches(std::int64_t row, std::int64_t behind) const {
    const std::int64_t position = sequences.position(row);
    return position + behind < sequences.length && sequences.start(row + behind) <= position;
  }
  ECHELON_HOST_DEVICE bool sees(std::int64_t row, std::int64_t before) const {
    return sequences.position(row) - before >= sequences.start(row);
  }
};

// w (C, K): for each channel the weights of the K - 1 positions before, and of its own.
template <class T>
struct ShortConvolution {
  using F = Wide<T>;
  GatedChannels<T> at;
  Matrix<T> w, y;
  ECHELON_HOST_DEVICE F convolved(std::int64_t i, std::int64_t j) const {
    F sum = 0;
    for (std::int64_t k = 0; k < w.cols; ++k) {
      const std::int64_t before = w.cols - 1 - k;
      if (at.sees(i, before)) sum += F(w[j][k]) * (at.b(i - before, j) * at.x(i - before, j));
    }
    return sum;
  }
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    y[i][j] = T(at.gate(i, j) * convolved(i, j));
  }
};
// Recomputes y.
template <class T>
struct ShortConvolutionBackward {
  using F = Wide<T>;
  ShortConvolution<T> forward;
  Matrix<T> dy, d_given;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    const GatedChannels<T>& at = forward.at;
    const Matrix<T>& w = forward.w;
    F sum = 0;
    for (std::int64_t behind = 0; behind < w.cols; ++behind)
      if (at.reaches(i, behind))
        sum += F(w[j][w.cols - 1 - behind]) * (F(dy[i + behind][j]) * at.gate(i + behind, j));
    const F u = forward.convolved(i, j);
    d_given[i][j] = T(sum * at.x(i, j));
    d_given[i][at.width + j] = T(F(dy[i][j]) * u);
    d_given[i][2 * at.width + j] = T(sum * at.b(i, j));
    forward.y[i][j] = T(at.gate(i, j) * u);
  }
};
// A block for each channel.
template <class T>
struct ShortConvolutionBackwardWeight {
  using F = Wide<T>;
  GatedChannels<T> at;
  Matrix<T> dy;
  Matrix<F> dw;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t c) const {
    for (std::int64_t k = 0; k < dw.cols; ++k) {
      const std::int64_t before = dw.cols - 1 - k;
      F sum = 0;
      for (std::int64_t row = team.lane(); row < dy.rows; row += team.lanes())
        if (at.sees(row, before))
          sum += (F(dy[row][c]) * at.gate(row, c)) * (at.b(row - before, c) * at.x(row - before, c));
      sum = sum_of(team, sum);
      if (team.lane() == 0) dw[c][k] += sum;
    }
  }
};

}  // namespace echelon::rows
