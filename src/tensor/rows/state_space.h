// Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060): a causal convolution of each channel, and the
// parts of the chunked scan besides its matrix products (tensor/state_space_scan.h explains the notation).
#pragma once

#include <cmath>
#include <cstdint>

#include "base/bf16.h"
#include "tensor/rows/activations.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

template <class F>
ECHELON_HOST_DEVICE F softplus(F x) {
  return (x > F(0) ? x : F(0)) + std::log1p(std::exp(x > F(0) ? -x : x));
}
template <class F>
ECHELON_HOST_DEVICE F silu_slope(F x) {
  const F s = sigmoid(x);
  return s + x * s * (F(1) - s);
}

// Sequences of `length` rows, one after another; and for each row the position at which its document begins
// (null: 0).
struct RowsOfSequences {
  std::int64_t length;
  const std::int32_t* first;
  ECHELON_HOST_DEVICE std::int64_t position(std::int64_t row) const { return row % length; }
  ECHELON_HOST_DEVICE std::int64_t start(std::int64_t row) const { return first == nullptr ? 0 : first[row]; }
};

// w (C, K): for each channel the weights of the K - 1 positions before, and of its own.
template <class T>
struct Taps {
  Matrix<T> w;
  const T* bias;  // or null
  RowsOfSequences sequences;
  // The convolution's output for x, before its activation.
  ECHELON_HOST_DEVICE Wide<T> sum(const Matrix<T>& x, std::int64_t row, std::int64_t c) const {
    using F = Wide<T>;
    const std::int64_t position = sequences.position(row), start = sequences.start(row);
    F sum = bias == nullptr ? F(0) : F(bias[c]);
    for (std::int64_t k = 0; k < w.cols; ++k) {
      const std::int64_t before = w.cols - 1 - k;
      if (position - before >= start) sum += F(w[c][k]) * F(x[row - before][c]);
    }
    return sum;
  }
};

// y = SiLU of that.
template <class T>
struct Convolve {
  Matrix<T> x;
  Taps<T> taps;
  Matrix<Wide<T>> y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    const Wide<T> u = taps.sum(x, i, j);
    y[i][j] = u * sigmoid(u);
  }
};
// dy becomes the gradient of SiLU's input.
template <class T>
struct ConvolveBackward {
  Matrix<T> x;
  Taps<T> taps;
  Matrix<Wide<T>> dy;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    dy[i][j] *= silu_slope(taps.sum(x, i, j));
  }
};
// du: the result of ConvolveBackward.
template <class T>
struct ConvolveBackwardInput {
  Matrix<Wide<T>> du;
  Taps<T> taps;
  Matrix<T> dx;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    using F = Wide<T>;
    const std::int64_t position = taps.sequences.position(i);
    F sum = 0;
    for (std::int64_t behind = 0; behind < taps.w.cols; ++behind)
      if (position + behind < taps.sequences.length && taps.sequences.start(i + behind) <= position)
        sum += F(taps.w[j][taps.w.cols - 1 - behind]) * du[i + behind][j];
    dx[i][j] = T(sum);
  }
};
// A block for each channel.
template <class T>
struct ConvolveBackwardWeight {
  Matrix<Wide<T>> du;
  Matrix<T> x;
  RowsOfSequences sequences;
  Matrix<Wide<T>> dw;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t c) const {
    using F = Wide<T>;
    for (std::int64_t k = 0; k < dw.cols; ++k) {
      const std::int64_t before = dw.cols - 1 - k;
      F sum = 0;
      for (std::int64_t row = team.lane(); row < du.rows; row += team.lanes())
        if (sequences.position(row) - before >= sequences.start(row))
          sum += du[row][c] * F(x[row - before][c]);
      sum = sum_of(team, sum);
      if (team.lane() == 0) dw[c][k] += sum;
    }
  }
};

// One sequence in chunks; rows are its positions.
struct Chunks {
  std::int64_t length, chunk;
  const std::int32_t* first;  // of this sequence
  ECHELON_HOST_DEVICE std::int64_t begin(std::int64_t c) const { return c * chunk; }
  ECHELON_HOST_DEVICE std::int64_t end(std::int64_t c) const {
    return (c + 1) * chunk < length ? (c + 1) * chunk : length;
  }
  ECHELON_HOST_DEVICE std::int64_t start(std::int64_t t) const { return first == nullptr ? 0 : first[t]; }
  // Whether a position continues from the state before its chunk, which begins at `chunk_begin`.
  ECHELON_HOST_DEVICE bool goes_on(std::int64_t t, std::int64_t chunk_begin) const {
    return first == nullptr || first[t] < chunk_begin;
  }
};

// The steps dt (T, H) of a sequence, and running sums (T, H) of dt A, the logarithms of decays, within each
// chunk, with the rounding errors of these sums (Knuth's TwoSum): if decays are fast, the decay between two
// positions is a small difference of large sums. A block for each chunk.
template <class T>
struct ScanSteps {
  Matrix<T> raw;
  const T* bias;
  const T* a_log;
  Chunks chunks;
  Matrix<Wide<T>> steps, sums, rests;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t c) const {
    using F = Wide<T>;
    for (std::int64_t h = team.lane(); h < raw.cols; h += team.lanes()) {
      const F rate = -std::exp(F(a_log[h]));
      F sum = 0, rest = 0;
      for (std::int64_t t = chunks.begin(c); t < chunks.end(c); ++t) {
        const F step = softplus(F(raw[t][h]) + F(bias[h])), more = step * rate, all = sum + more,
                added = all - sum;
        rest += (sum - (all - added)) + (more - added);
        sum = all;
        steps[t][h] = step;
        sums[t][h] = sum;
        rests[t][h] = rest;
      }
    }
  }
};

// Shared by the blocks of one chunk: everything is wide, and rows count from the chunk's first.
template <class F>
struct OneChunk {
  Chunks chunks;
  std::int64_t begin, rows, head_dim, heads_of_group;
  Matrix<F> steps, sums, rests;  // of the chunk
  ECHELON_HOST_DEVICE std::int64_t heads() const { return steps.cols; }
  // How much of the state from before the chunk is left at a row.
  ECHELON_HOST_DEVICE F left(std::int64_t t, std::int64_t h) const {
    return chunks.goes_on(begin + t, begin) ? std::exp(sums[t][h] + rests[t][h]) : F(0);
  }
  // How much of row s's input is left at row t >= s.
  ECHELON_HOST_DEVICE F between(std::int64_t s, std::int64_t t, std::int64_t h) const {
    return begin + s >= chunks.start(begin + t)
               ? std::exp((sums[t][h] - sums[s][h]) + (rests[t][h] - rests[s][h]))
               : F(0);
  }
};

// dt x, and what of it is left at the chunk's end. A block for each row.
template <class F>
struct ScanInputs {
  OneChunk<F> at;
  Matrix<F> x, stepped, last;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    for (std::int64_t h = 0; h < at.heads(); ++h) {
      const F step = at.steps[t][h], kept = at.between(t, at.rows - 1, h);
      for (std::int64_t j = h * at.head_dim + team.lane(); j < (h + 1) * at.head_dim; j += team.lanes()) {
        stepped[t][j] = step * x[t][j];
        last[t][j] = kept * stepped[t][j];
      }
    }
  }
};

// For each head and row t, the weights of rows s <= t: C_t . B_s, given in `products` (groups x rows, rows),
// times the decay between them. A block for each head and row.
template <class F>
struct ScanWeights {
  OneChunk<F> at;
  Matrix<F> products, weights;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const std::int64_t h = i / at.rows, t = i % at.rows;
    const F* const product = products[h / at.heads_of_group * at.rows + t];
    for (std::int64_t s = team.lane(); s < at.rows; s += team.lanes())
      weights[i][s] = s <= t ? product[s] * at.between(s, t, h) : F(0);
  }
};
// The gradient of the products: a block for each group and row.
template <class F>
struct ScanWeightsBackward {
  OneChunk<F> at;
  Matrix<F> d_weights, d_products;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const std::int64_t group = i / at.rows, t = i % at.rows;
    for (std::int64_t s = team.lane(); s < at.rows; s += team.lanes()) {
      F sum = 0;
      for (std::int64_t h = group * at.heads_of_group; s <= t && h < (group + 1) * at.heads_of_group; ++h)
        sum += d_weights[h * at.rows + t][s] * at.between(s, t, h);
      d_products[i][s] = sum;
    }
  }
};

// d_weights[t][s] becomes the sum over rows from t on of weights times their gradients, for s < t, plus
// `more` (unless null): a block for each head.
template <class F>
struct ScanDecaysBackward {
  std::int64_t rows;
  Matrix<F> weights, d_weights;
  const F* more;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t h) const {
    for (std::int64_t t = rows; t-- > 1;) {
      const F* const weight = weights[h * rows + t];
      F* const gradient = d_weights[h * rows + t];
      const F* const also = more == nullptr ? nullptr : more + (h * rows + t) * rows;
      const F* const behind = t + 1 < rows ? d_weights[h * rows + t + 1] : nullptr;
      for (std::int64_t s = team.lane(); s < t; s += team.lanes())
        gradient[s] = weight[s] * gradient[s] + (also == nullptr ? F(0) : also[s]) +
                      (behind == nullptr ? F(0) : behind[s]);
    }
  }
};
// The sums of that over s: what rows from t on get from rows before t. A block for each head and row.
template <class F>
struct ScanDecaySums {
  std::int64_t rows;
  Matrix<F> parts, within;  // within (T, H)
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const std::int64_t h = i / rows, t = i % rows;
    F sum = 0;
    for (std::int64_t s = team.lane(); s < t; s += team.lanes()) sum += parts[i][s];
    sum = sum_of(team, sum);
    if (team.lane() == 0) within[t][h] = sum;
  }
};

// to = from times the decay up to the chunk's end, for each head: states (H P, N), a block for each row. `to`
// and `from` may be the same.
template <class F>
struct ScanDecay {
  OneChunk<F> at;
  Matrix<F> from, to;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const F left = at.left(at.rows - 1, i / at.head_dim);
    for (std::int64_t n = team.lane(); n < to.cols; n += team.lanes()) to[i][n] = left * from[i][n];
  }
};

// y = (output from the earlier state + output from the chunk + D x) SiLU(z). A block for each row.
template <class T>
struct ScanOutput {
  using F = Wide<T>;
  OneChunk<F> at;
  Matrix<F> x, of_state, of_chunk;
  const T* d;
  Matrix<T> z, y;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    for (std::int64_t h = 0; h < at.heads(); ++h) {
      const F left = at.left(t, h), through = F(d[h]);
      for (std::int64_t j = h * at.head_dim + team.lane(); j < (h + 1) * at.head_dim; j += team.lanes()) {
        const F gate = F(z[t][j]), sum = left * of_state[t][j] + of_chunk[t][j] + through * x[t][j];
        y[t][j] = T(sum * gate * sigmoid(gate));
      }
    }
  }
};
// of_chunk becomes the gradient of the gated value, of_state that of the earlier state's output. `read` (T,
// H) is the product of the gradient with that output, d_through (T, H) the terms of D's gradient.
template <class T>
struct ScanOutputBackward {
  using F = Wide<T>;
  OneChunk<F> at;
  Matrix<F> x, of_state, of_chunk;
  const T* d;
  Matrix<T> z, dy, dz;
  Matrix<F> read, d_through;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    for (std::int64_t h = 0; h < at.heads(); ++h) {
      const F left = at.left(t, h), through = F(d[h]);
      F of_earlier = 0, of_input = 0;
      for (std::int64_t j = h * at.head_dim + team.lane(); j < (h + 1) * at.head_dim; j += team.lanes()) {
        const F gate = F(z[t][j]), earlier = left * of_state[t][j], input = x[t][j];
        const F whole = F(dy[t][j]), inner = whole * gate * sigmoid(gate);
        dz[t][j] = T(whole * (earlier + of_chunk[t][j] + through * input) * silu_slope(gate));
        of_chunk[t][j] = inner;
        of_state[t][j] = left * inner;
        of_earlier += inner * earlier;
        of_input += inner * input;
      }
      of_earlier = sum_of(team, of_earlier);
      of_input = sum_of(team, of_input);
      if (team.lane() == 0) read[t][h] = of_earlier, d_through[t][h] = of_input;
    }
  }
};

// dx: from dt x through the chunk's own rows and through the state at its end, and from D. `written` (T, H)
// is the product of x with the gradient of dt x, `handed` (T, H) the product of dt x with the part of that
// gradient from the state at the end.
template <class T>
struct ScanInputsBackward {
  using F = Wide<T>;
  OneChunk<F> at;
  Matrix<F> x, dy, d_stepped, d_last;
  const T* d;
  Matrix<F> dx, written, handed;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    for (std::int64_t h = 0; h < at.heads(); ++h) {
      const F step = at.steps[t][h], kept = at.between(t, at.rows - 1, h), through = F(d[h]);
      F sum = 0, of_end = 0;
      for (std::int64_t j = h * at.head_dim + team.lane(); j < (h + 1) * at.head_dim; j += team.lanes()) {
        const F by_end = kept * d_last[t][j], gradient = d_stepped[t][j] + by_end;
        sum += x[t][j] * gradient;
        of_end += x[t][j] * by_end;
        dx[t][j] = step * gradient + through * dy[t][j];
      }
      sum = sum_of(team, sum);
      of_end = sum_of(team, of_end);
      if (team.lane() == 0) written[t][h] = sum, handed[t][h] = step * of_end;
    }
  }
};

// For each head, the product of what is left of a state (H P, N) at the chunk's end with the gradient there:
// a block for each head.
template <class F>
struct ScanStateProduct {
  OneChunk<F> at;
  Matrix<F> state, gradient;
  F* products;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t h) const {
    F sum = 0;
    for (std::int64_t i = h * at.head_dim; i < (h + 1) * at.head_dim; ++i)
      for (std::int64_t n = team.lane(); n < state.cols; n += team.lanes())
        sum += state[i][n] * gradient[i][n];
    sum = sum_of(team, sum);
    if (team.lane() == 0) products[h] = at.left(at.rows - 1, h) * sum;
  }
};

// The gradient of the logarithm of position t's decay is the sum over everything that passes through it,
// times its gradient: from rows before t to rows from t on (`within`), from the earlier state to the latter
// (`read`), from the former to the state at the end (`handed`), and from state to state (`past`). No term is
// a difference: g_t . h_t - g_t . (dt x)_t, with g_t the gradient of h_t, would be equal, but leaves only
// rounding errors for a fast decay. One block; `terms` (T, 3 H) gets the terms of the gradients of dt's bias
// (also the gradient of dt before its softplus), of A's logarithm, and of D (given). `handed` becomes its
// running sums over the rows before.
template <class T>
struct ScanStepsBackward {
  using F = Wide<T>;
  OneChunk<F> at;
  Matrix<T> raw;
  const T* bias;
  const T* a_log;
  Matrix<F> within, read, written, handed;
  const F* past;
  Matrix<T> d_raw;
  Matrix<F> terms;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t) const {
    for (std::int64_t h = team.lane(); h < at.heads(); h += team.lanes()) {
      const F rate = -std::exp(F(a_log[h]));
      F before = past[h], from_state = 0;
      for (std::int64_t t = 0; t < at.rows; ++t) {
        const F here = handed[t][h];
        handed[t][h] = before;
        before += here;
      }
      for (std::int64_t t = at.rows; t-- > 0;) {
        const F step = at.steps[t][h];
        from_state += read[t][h];
        const F sum = within[t][h] + from_state + handed[t][h];
        const F gradient = (rate * sum + written[t][h]) * sigmoid(F(raw[t][h]) + F(bias[h]));
        d_raw[t][h] = T(gradient);
        terms[t][h] = gradient;
        terms[t][at.heads() + h] = step * rate * sum;
      }
    }
  }
};

}  // namespace echelon::rows
