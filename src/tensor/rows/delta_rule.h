// The parts of the gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464) besides the scan
// that it shares with Mamba-2 (rows/state_space.h; tensor/state_space_scan.h explains the notation). B are
// keys, C queries, x values.
#pragma once

#include <cmath>
#include <cstdint>

#include "tensor/rows/state_space.h"

namespace echelon::rows {

// For a sequence: betas, and keys and queries (T, 2 G N) normalised to length 1, queries times query_scale.
// `factors` (T, 2 G): the normalising factors. 1e-6 is part of the rule. A block for each row.
template <class T>
struct DeltaUnits {
  using F = Wide<T>;
  Matrix<T> raw;
  Matrix<F> betas, x;
  std::int64_t state;
  F query_scale;
  Matrix<F> factors;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    for (std::int64_t h = team.lane(); h < raw.cols; h += team.lanes()) betas[t][h] = sigmoid(F(raw[t][h]));
    for (std::int64_t i = 0; i < factors.cols; ++i) {
      F* const one = x[t] + i * state;
      F squares = 0;
      for (std::int64_t n = team.lane(); n < state; n += team.lanes()) squares += one[n] * one[n];
      squares = sum_of(team, squares);
      const F factor = (2 * i < factors.cols ? F(1) : query_scale) / std::sqrt(squares + F(1e-6));
      for (std::int64_t n = team.lane(); n < state; n += team.lanes()) one[n] *= factor;
      if (team.lane() == 0) factors[t][i] = factor;
    }
  }
};
// `d`, the gradient of DeltaUnits' results, becomes the gradient of its inputs. A block for each row.
template <class F>
struct DeltaUnitsBackward {
  Matrix<F> x;
  std::int64_t state;
  F query_scale;
  Matrix<F> factors, d;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    for (std::int64_t i = 0; i < factors.cols; ++i) {
      const F* const one = x[t] + i * state;
      F* const gradient = d[t] + i * state;
      const F length = 2 * i < factors.cols ? F(1) : query_scale;
      F product = 0;
      for (std::int64_t n = team.lane(); n < state; n += team.lanes()) product += one[n] * gradient[n];
      product = sum_of(team, product) / (length * length);
      for (std::int64_t n = team.lane(); n < state; n += team.lanes())
        gradient[n] = factors[t][i] * (gradient[n] - one[n] * product);
    }
  }
};

// Shared by the blocks of one chunk. `mixed` (heads x rows, rows): how much of row s's u row t removes.
template <class F>
struct DeltaChunk {
  OneChunk<F> at;
  Matrix<F> betas, mixed;
};

// Computes mixed from the products of keys (groups x rows, rows). A block for each head and row.
template <class F>
struct DeltaMixed {
  DeltaChunk<F> of;
  Matrix<F> products;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const OneChunk<F>& at = of.at;
    const std::int64_t h = i / at.rows, t = i % at.rows;
    const F* const product = products[h / at.heads_of_group * at.rows + t];
    for (std::int64_t s = team.lane(); s < at.rows; s += team.lanes())
      of.mixed[i][s] = s < t ? of.betas[t][h] * product[s] * at.between(s, t, h) : F(0);
  }
};

// Computes u row by row, and what is left of it at the chunk's end. `recalled`: what the state before the
// chunk holds for a key, before its decay. A block for each head; a lane takes separate columns.
template <class F>
struct DeltaSolve {
  DeltaChunk<F> of;
  Matrix<F> values, recalled, u, last;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t h) const {
    const OneChunk<F>& at = of.at;
    const std::int64_t begin = h * at.head_dim + team.lane(), end = (h + 1) * at.head_dim;
    for (std::int64_t t = 0; t < at.rows; ++t) {
      const F beta = of.betas[t][h], left = at.left(t, h), kept = at.between(t, at.rows - 1, h);
      for (std::int64_t j = begin; j < end; j += team.lanes())
        u[t][j] = beta * (values[t][j] - left * recalled[t][j]);
      for (std::int64_t s = 0; s < t; ++s) {
        const F taken = of.mixed[h * at.rows + t][s];
        for (std::int64_t j = begin; j < end; j += team.lanes()) u[t][j] -= taken * u[s][j];
      }
      for (std::int64_t j = begin; j < end; j += team.lanes()) last[t][j] = kept * u[t][j];
    }
  }
};
// Adds to du of a chunk's rows what comes from the state at its end; `handed` as ScanInputsBackward leaves
// it. A block for each row.
template <class F>
struct DeltaInputsBackward {
  DeltaChunk<F> of;
  Matrix<F> u, d_last, du, handed;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    const OneChunk<F>& at = of.at;
    for (std::int64_t h = 0; h < at.heads(); ++h) {
      const F kept = at.between(t, at.rows - 1, h);
      F of_end = 0;
      for (std::int64_t j = h * at.head_dim + team.lane(); j < (h + 1) * at.head_dim; j += team.lanes()) {
        const F by_end = kept * d_last[t][j];
        of_end += u[t][j] * by_end;
        du[t][j] += by_end;
      }
      of_end = sum_of(team, of_end);
      if (team.lane() == 0) handed[t][h] = of_end;
    }
  }
};
// du becomes the gradient of the system's right side, from the last row to the first. Blocks and lanes as in
// DeltaSolve.
template <class F>
struct DeltaSolveBackward {
  DeltaChunk<F> of;
  Matrix<F> du;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t h) const {
    const OneChunk<F>& at = of.at;
    const std::int64_t begin = h * at.head_dim + team.lane(), end = (h + 1) * at.head_dim;
    for (std::int64_t t = at.rows; t-- > 0;)
      for (std::int64_t s = 0; s < t; ++s) {
        const F taken = of.mixed[h * at.rows + t][s];
        for (std::int64_t j = begin; j < end; j += team.lanes()) du[s][j] -= taken * du[t][j];
      }
  }
};
// From d, the gradient of the right side, computes the gradients of betas and values; of the state's part,
// which `recalled` becomes; and what decays get, which is added to `read`. d_mixed holds the products of d
// and u, and becomes this head's gradient of the products of keys; mixed becomes itself times its gradient. A
// block for each head and row.
template <class T>
struct DeltaMixedBackward {
  using F = Wide<T>;
  DeltaChunk<F> of;
  Matrix<F> products, d_mixed, values, d, recalled, d_values, read;
  Matrix<T> d_beta;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const OneChunk<F>& at = of.at;
    const std::int64_t h = i / at.rows, t = i % at.rows;
    const F* const product = products[h / at.heads_of_group * at.rows + t];
    const F beta = of.betas[t][h], left = at.left(t, h);
    F of_beta = 0, of_left = 0;
    for (std::int64_t s = team.lane(); s < at.rows; s += team.lanes()) {
      const F gradient = s < t ? -d_mixed[i][s] : F(0), between = s < t ? at.between(s, t, h) : F(0);
      of_beta += gradient * between * product[s];
      of.mixed[i][s] *= gradient;
      d_mixed[i][s] = gradient * beta * between;
    }
    for (std::int64_t j = h * at.head_dim + team.lane(); j < (h + 1) * at.head_dim; j += team.lanes()) {
      const F gradient = d[t][j], earlier = left * recalled[t][j];
      of_beta += gradient * (values[t][j] - earlier);
      of_left += gradient * earlier;
      d_values[t][j] = beta * gradient;
      recalled[t][j] = -beta * left * gradient;
    }
    of_beta = sum_of(team, of_beta);
    of_left = sum_of(team, of_left);
    if (team.lane() == 0) {
      d_beta[t][h] = T(of_beta * beta * (F(1) - beta));
      read[t][h] -= beta * of_left;
    }
  }
};
// The gradient of the products of keys: a block for each group and row.
template <class F>
struct DeltaKeysBackward {
  OneChunk<F> at;
  Matrix<F> d_mixed, d_products;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const std::int64_t group = i / at.rows, t = i % at.rows;
    for (std::int64_t s = team.lane(); s < at.rows; s += team.lanes()) {
      F sum = 0;
      for (std::int64_t h = group * at.heads_of_group; h < (group + 1) * at.heads_of_group; ++h)
        sum += d_mixed[h * at.rows + t][s];
      d_products[i][s] = sum;
    }
  }
};

// y = RMSNorm of each head's output (from the state and the chunk), times SiLU(z). A block for each row.
template <class T>
struct DeltaOutput {
  using F = Wide<T>;
  OneChunk<F> at;
  Matrix<F> of_state, of_chunk;
  const T* weight;
  F eps;
  Matrix<T> z, y;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    for (std::int64_t h = 0; h < at.heads(); ++h) {
      const F left = at.left(t, h);
      const std::int64_t first = h * at.head_dim;
      F squares = 0;
      for (std::int64_t j = team.lane(); j < at.head_dim; j += team.lanes()) {
        const F sum = left * of_state[t][first + j] + of_chunk[t][first + j];
        squares += sum * sum;
      }
      const F scale = F(1) / std::sqrt(sum_of(team, squares) / F(at.head_dim) + eps);
      for (std::int64_t j = team.lane(); j < at.head_dim; j += team.lanes()) {
        const F gate = F(z[t][first + j]), sum = left * of_state[t][first + j] + of_chunk[t][first + j];
        y[t][first + j] = T(sum * scale * F(weight[j]) * gate * sigmoid(gate));
      }
    }
  }
};
// As ScanOutputBackward; d_weight (T, P) are the terms of the norm weight's gradient.
template <class T>
struct DeltaOutputBackward {
  using F = Wide<T>;
  OneChunk<F> at;
  Matrix<F> of_state, of_chunk;
  const T* weight;
  F eps;
  Matrix<T> z, dy, dz;
  Matrix<F> read, d_weight;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t t) const {
    const F width = F(at.head_dim);
    for (std::int64_t j = team.lane(); j < at.head_dim; j += team.lanes()) d_weight[t][j] = F(0);
    for (std::int64_t h = 0; h < at.heads(); ++h) {
      const F left = at.left(t, h);
      const std::int64_t first = h * at.head_dim;
      F squares = 0, product = 0;  // of what is normalised, and its product with its gradient
      for (std::int64_t j = team.lane(); j < at.head_dim; j += team.lanes()) {
        const F gate = F(z[t][first + j]), sum = left * of_state[t][first + j] + of_chunk[t][first + j];
        squares += sum * sum;
        product += sum * F(dy[t][first + j]) * gate * sigmoid(gate) * F(weight[j]);
      }
      const F scale = F(1) / std::sqrt(sum_of(team, squares) / width + eps),
              mean = sum_of(team, product) * scale / width;
      F of_earlier = 0;
      for (std::int64_t j = team.lane(); j < at.head_dim; j += team.lanes()) {
        const F gate = F(z[t][first + j]), earlier = left * of_state[t][first + j],
                normed = (earlier + of_chunk[t][first + j]) * scale, whole = F(dy[t][first + j]),
                gated = whole * gate * sigmoid(gate), inner = scale * (gated * F(weight[j]) - normed * mean);
        dz[t][first + j] = T(whole * normed * F(weight[j]) * silu_slope(gate));
        d_weight[t][j] += gated * normed;
        of_chunk[t][first + j] = inner;
        of_state[t][first + j] = left * inner;
        of_earlier += inner * earlier;
      }
      of_earlier = sum_of(team, of_earlier);
      if (team.lane() == 0) read[t][h] = of_earlier;
    }
  }
};

}  // namespace echelon::rows
