// Causal attention by tiles in a block's shared memory, with online softmax (Dao 2022,
// https://arxiv.org/abs/2205.14135; Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867). Implements
// Kernels::attention. All sums are Wide<T>; each output is written by one block, so the same call has the
// same bits.
#pragma once

#include <cmath>

#include "base/alibi.h"
#include "base/bf16.h"
#include "tensor/causal.h"
#include "tensor/rows/tile_product.h"

namespace echelon::rows {

// AttentionShape for devices.
struct AttentionSizes {
  std::int64_t batch, q_len, kv_len, num_heads, num_kv_heads;
  int head_dim;
  std::int64_t q_offset, q_step, k_step;
  std::int64_t kv_batch_stride;  // never 0
  double scale, cap;
  Alibi alibi;
  bool accumulate;
  const std::int32_t* first_keys;  // or null
  int tile;                        // queries, or keys, of a block
  int heads_together = 1;          // for tensor cores (tensor/rows/warp_attention.h)

  ECHELON_HOST_DEVICE std::int64_t tiles_of(std::int64_t n) const { return (n + tile - 1) / tile; }
  // A query of a sequence sees keys [first_key, end_key).
  ECHELON_HOST_DEVICE std::int64_t end_key(std::int64_t query) const {
    return causal_keys(q_offset + query * q_step, k_step, kv_len);
  }
  ECHELON_HOST_DEVICE std::int64_t first_key(std::int64_t sequence, std::int64_t query) const {
    return first_keys == nullptr ? 0 : first_keys[sequence * q_len + query];
  }
  // Positions from a query back to a key.
  ECHELON_HOST_DEVICE std::int64_t distance(std::int64_t query, std::int64_t key) const {
    return q_offset + query * q_step - key * k_step;
  }
  // Index into lse and delta.
  ECHELON_HOST_DEVICE std::int64_t softmax(std::int64_t sequence, std::int64_t head,
                                           std::int64_t query) const {
    return (sequence * num_heads + head) * q_len + query;
  }
};

// The rows of a head's tile are one element longer than the head, so that the elements of a column are in
// different banks.
inline std::size_t attention_tile_elements(int tile, int head_dim) {
  return static_cast<std::size_t>(tile * (head_dim + 1));
}
// What a block needs for `tiles` tiles of a head, `squares` of scores, and `rows` numbers for each row.
inline std::size_t attention_shared_bytes(int tile, int head_dim, int tiles, int squares, int rows,
                                          std::size_t element_bytes) {
  return element_bytes *
         (static_cast<std::size_t>(tiles) * attention_tile_elements(tile, head_dim) +
          static_cast<std::size_t>(squares * tile * (tile + 1)) + static_cast<std::size_t>(rows * tile));
}

// The score for a product q.k of a query and a key: scale q.k, capped if the shape says so, less what ALiBi
// takes off with the head's slope.
template <class F>
ECHELON_HOST_DEVICE F score_from(const AttentionSizes& s, F slope, std::int64_t query, std::int64_t key,
                                 F product) {
  const F score = F(s.scale) * product;
  if (s.alibi.is_used()) return score - slope * F(s.distance(query, key));
  return s.cap > 0 ? F(s.cap) * std::tanh(score / F(s.cap)) : score;
}

// The keys that some query of [query, query + rows) sees.
struct KeyRange {
  std::int64_t begin, end;
};
ECHELON_HOST_DEVICE inline KeyRange keys_of(const AttentionSizes& s, std::int64_t sequence,
                                            std::int64_t query, int rows) {
  KeyRange keys{s.first_key(sequence, query), s.end_key(query + rows - 1)};
  for (int i = 1; i < rows; ++i) {
    const std::int64_t first = s.first_key(sequence, query + i);
    if (first < keys.begin) keys.begin = first;
  }
  return keys;
}

template <class Team, class F>
ECHELON_HOST_DEVICE void clear_tile(const Team& team, F* tile, int rows, int cols, int stride) {
  for (int e = static_cast<int>(team.lane()); e < rows * cols; e += static_cast<int>(team.lanes()))
    tile[e / cols * stride + e % cols] = F(0);
}
template <class Team, class T, class F>
ECHELON_HOST_DEVICE void store_tile(const Team& team, const F* tile, int stride, const Matrix<T>& m,
                                    std::int64_t row, std::int64_t col, int rows, int cols) {
  for (int e = static_cast<int>(team.lane()); e < rows * cols; e += static_cast<int>(team.lanes()))
    m[row + e / cols][col + e % cols] = T(tile[e / cols * stride + e % cols]);
}
// Sums start from stored values, or from zero.
template <class Team, class T, class F>
ECHELON_HOST_DEVICE void begin_sums(const Team& team, bool from_stored, const Matrix<T>& m, std::int64_t row,
                                    std::int64_t col, int rows, int cols, F* tile, int stride) {
  if (from_stored)
    load_tile(team, m, false, row, col, rows, cols, tile, stride);
  else
    clear_tile(team, tile, rows, cols, stride);
}

// A block for each tile of queries of a head.
template <class T>
struct TiledAttention {
  using F = Wide<T>;
  AttentionSizes s;
  Matrix<T> q, k, v, out;
  F* lse;

  static std::size_t shared_bytes(int tile, int head_dim) {
    return attention_shared_bytes(tile, head_dim, 3, 1, 3, sizeof(F));
  }
  std::int64_t num_blocks() const { return s.batch * s.num_heads * s.tiles_of(s.q_len); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t of_head = s.tiles_of(s.q_len), head = team.block() / of_head % s.num_heads;
    const std::int64_t query = team.block() % of_head * s.tile,
                       sequence = team.block() / of_head / s.num_heads;
    const int rows = static_cast<int>(s.q_len - query < s.tile ? s.q_len - query : s.tile);
    const std::int64_t kv_column = head / (s.num_heads / s.num_kv_heads) * s.head_dim;
    const std::int64_t first_row = sequence * s.q_len + query, column = head * s.head_dim;
    const int stride = s.head_dim + 1, score_stride = s.tile + 1;
    F* const queries = reinterpret_cast<F*>(team.shared());
    F* const keys = queries + s.tile * stride;  // later values
    F* const sums = keys + s.tile * stride;
    F* const scores = sums + s.tile * stride;
    F* const max = scores + s.tile * score_stride;
    F *const total = max + s.tile, *const factor = total + s.tile;
    const int lane = static_cast<int>(team.lane()), lanes = static_cast<int>(team.lanes());
    const F slope = F(s.alibi.slope(head));

    load_tile(team, q, false, first_row, column, rows, s.head_dim, queries, stride);
    begin_sums(team, s.accumulate, out, first_row, column, rows, s.head_dim, sums, stride);
    team.sync();
    // The result of earlier calls counts as one more key, with their lse as its score and their out as its
    // value.
    for (int i = lane; i < rows; i += lanes) {
      const F earlier = s.accumulate ? lse[s.softmax(sequence, head, query + i)] : -static_cast<F>(INFINITY);
      const bool begun = earlier != -static_cast<F>(INFINITY);
      max[i] = begun ? earlier : -static_cast<F>(INFINITY);
      total[i] = begun ? F(1) : F(0);
      if (!begun)
        for (int d = 0; d < s.head_dim; ++d) sums[i * stride + d] = F(0);
    }
    const KeyRange seen = keys_of(s, sequence, query, rows);
    for (std::int64_t key = seen.begin / s.tile * s.tile; key < seen.end; key += s.tile) {
      const int cols = static_cast<int>(seen.end - key < s.tile ? seen.end - key : s.tile);
      const std::int64_t first_key = sequence * s.kv_batch_stride + key;
      team.sync();
      load_tile(team, k, false, first_key, kv_column, cols, s.head_dim, keys, stride);
      clear_tile(team, scores, rows, cols, score_stride);
      team.sync();
      add_tile_product(team, TileOperand<F>{queries, stride, 1}, TileOperand<F>{keys, stride, 1}, rows, cols,
                       s.head_dim, scores, score_stride);
      team.sync();
      load_tile(team, v, false, first_key, kv_column, cols, s.head_dim, keys, stride);
      for (int i = lane; i < rows; i += lanes) {
        F most = max[i];
        for (int j = first_of(sequence, query + i, key); j < end_of(query + i, key, cols); ++j) {
          F& score = scores[i * score_stride + j];
          score = score_from(s, slope, query + i, key + j, score);
          most = Larger()(most, score);
        }
        factor[i] = max[i] == most ? F(1) : std::exp(max[i] - most);
        max[i] = most;
      }
      team.sync();
      for (int e = lane; e < rows * cols; e += lanes) {
        const int i = e / cols, j = e % cols;
        const bool sees = j >= first_of(sequence, query + i, key) && j < end_of(query + i, key, cols);
        F& p = scores[i * score_stride + j];
        p = sees ? std::exp(p - max[i]) : F(0);
      }
      for (int e = lane; e < rows * s.head_dim; e += lanes)
        sums[e / s.head_dim * stride + e % s.head_dim] *= factor[e / s.head_dim];
      team.sync();
      for (int i = lane; i < rows; i += lanes) {
        F of_tile = 0;
        for (int j = 0; j < cols; ++j) of_tile += scores[i * score_stride + j];
        total[i] = total[i] * factor[i] + of_tile;
      }
      add_tile_product(team, TileOperand<F>{scores, score_stride, 1}, TileOperand<F>{keys, 1, stride}, rows,
                       s.head_dim, cols, sums, stride);
    }
    team.sync();
    for (int i = lane; i < rows; i += lanes)
      lse[s.softmax(sequence, head, query + i)] = max[i] + std::log(total[i]);  // without keys: -infinity
    for (int e = lane; e < rows * s.head_dim; e += lanes) {
      const int i = e / s.head_dim, d = e % s.head_dim;
      out[first_row + i][column + d] = T(total[i] == F(0) ? F(0) : sums[i * stride + d] / total[i]);
    }
  }

  // The first of a tile's columns that a query sees, counted from the tile's first key.
  ECHELON_HOST_DEVICE int first_of(std::int64_t sequence, std::int64_t query, std::int64_t key) const {
    const std::int64_t first = s.first_key(sequence, query) - key;
    return first < 0 ? 0 : first < s.tile ? static_cast<int>(first) : s.tile;
  }
  ECHELON_HOST_DEVICE int end_of(std::int64_t query, std::int64_t key, int cols) const {
    const std::int64_t end = s.end_key(query) - key;
    return end < 0 ? 0 : end < cols ? static_cast<int>(end) : cols;
  }
};

// delta = out . dout, a team for each row and head.
template <class T>
struct AttentionDelta {
  AttentionSizes s;
  Matrix<T> out, dout;
  Wide<T>* delta;
  std::int64_t num_blocks() const { return s.batch * s.num_heads * s.q_len; }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t query = team.block() % s.q_len, head = team.block() / s.q_len % s.num_heads;
    const std::int64_t row = team.block() / s.q_len / s.num_heads * s.q_len + query;
    const T *x = out[row] + head * s.head_dim, *y = dout[row] + head * s.head_dim;
    Wide<T> sum = 0;
    for (std::int64_t d = team.lane(); d < s.head_dim; d += team.lanes()) sum += x[d] * y[d];
    sum = sum_of(team, sum);
    if (team.lane() == 0) delta[team.block()] = sum;
  }
};

// With p = softmax(s), s = scale q.k: dv_j = sum_t p_tj dout_t, ds_tj = p_tj (dout_t.v_j - delta_t), and dq
// and dk follow from ds; a cap has the slope 1 - (s / cap)^2. On entry `scores` (rows, cols) is q.k and
// `slopes` is dout.v; on exit they are p and scale ds, zero where a query does not see a key.
template <class T>
struct AttentionSlopes {
  using F = Wide<T>;
  AttentionSizes s;
  const F *lse, *delta;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t sequence, std::int64_t head,
                                      std::int64_t query, std::int64_t key, int rows, int cols, F* scores,
                                      F* slopes) const {
    const int stride = s.tile + 1, lanes = static_cast<int>(team.lanes());
    const F slope = F(s.alibi.slope(head));
    for (int e = static_cast<int>(team.lane()); e < rows * cols; e += lanes) {
      const int i = e / cols, j = e % cols;
      F &p = scores[i * stride + j], &ds = slopes[i * stride + j];
      if (key + j < s.first_key(sequence, query + i) || key + j >= s.end_key(query + i)) {
        p = ds = F(0);
        continue;
      }
      const std::int64_t at = s.softmax(sequence, head, query + i);
      const F score = score_from(s, slope, query + i, key + j, p), bent = s.cap > 0 ? score / F(s.cap) : F(0);
      p = std::exp(score - lse[at]);
      ds = F(s.scale) * p * (ds - delta[at]) * (1 - bent * bent);
    }
  }
};

// dq: a block for each tile of queries of a head.
template <class T>
struct TiledAttentionBackwardQueries {
  using F = Wide<T>;
  AttentionSlopes<T> slopes_of;
  Matrix<T> q, k, v, dout, dq;

  static std::size_t shared_bytes(int tile, int head_dim) {
    return attention_shared_bytes(tile, head_dim, 5, 2, 0, sizeof(F));
  }
  std::int64_t num_blocks() const {
    const AttentionSizes& s = slopes_of.s;
    return s.batch * s.num_heads * s.tiles_of(s.q_len);
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const AttentionSizes& s = slopes_of.s;
    const std::int64_t of_head = s.tiles_of(s.q_len), head = team.block() / of_head % s.num_heads;
    const std::int64_t query = team.block() % of_head * s.tile,
                       sequence = team.block() / of_head / s.num_heads;
    const int rows = static_cast<int>(s.q_len - query < s.tile ? s.q_len - query : s.tile);
    const std::int64_t kv_column = head / (s.num_heads / s.num_kv_heads) * s.head_dim;
    const std::int64_t first_row = sequence * s.q_len + query, column = head * s.head_dim;
    const int stride = s.head_dim + 1, score_stride = s.tile + 1, area = s.tile * stride;
    F* const queries = reinterpret_cast<F*>(team.shared());
    F *const gradients = queries + area, *const keys = gradients + area, *const values = keys + area,
             *const sums = values + area, *const scores = sums + area,
             *const slopes = scores + s.tile * score_stride;

    load_tile(team, q, false, first_row, column, rows, s.head_dim, queries, stride);
    load_tile(team, dout, false, first_row, column, rows, s.head_dim, gradients, stride);
    begin_sums(team, s.accumulate, dq, first_row, column, rows, s.head_dim, sums, stride);
    const KeyRange seen = keys_of(s, sequence, query, rows);
    for (std::int64_t key = seen.begin / s.tile * s.tile; key < seen.end; key += s.tile) {
      const int cols = static_cast<int>(seen.end - key < s.tile ? seen.end - key : s.tile);
      const std::int64_t first_key = sequence * s.kv_batch_stride + key;
      team.sync();
      load_tile(team, k, false, first_key, kv_column, cols, s.head_dim, keys, stride);
      load_tile(team, v, false, first_key, kv_column, cols, s.head_dim, values, stride);
      clear_tile(team, scores, rows, cols, score_stride);
      clear_tile(team, slopes, rows, cols, score_stride);
      team.sync();
      add_tile_product(team, TileOperand<F>{queries, stride, 1}, TileOperand<F>{keys, stride, 1}, rows, cols,
                       s.head_dim, scores, score_stride);
      add_tile_product(team, TileOperand<F>{gradients, stride, 1}, TileOperand<F>{values, stride, 1}, rows,
                       cols, s.head_dim, slopes, score_stride);
      team.sync();
      slopes_of(team, sequence, head, query, key, rows, cols, scores, slopes);
      team.sync();
      add_tile_product(team, TileOperand<F>{slopes, score_stride, 1}, TileOperand<F>{keys, 1, stride}, rows,
                       s.head_dim, cols, sums, stride);
    }
    team.sync();
    store_tile(team, sums, stride, dq, first_row, column, rows, s.head_dim);
  }
};

// dk and dv: a block for each tile of keys of a key/value head, over the query heads that read it and the
// queries that may see the keys.
template <class T>
struct TiledAttentionBackwardKeys {
  using F = Wide<T>;
  AttentionSlopes<T> slopes_of;
  Matrix<T> q, k, v, dout, dk, dv;

  static std::size_t shared_bytes(int tile, int head_dim) {
    return attention_shared_bytes(tile, head_dim, 6, 2, 0, sizeof(F));
  }
  std::int64_t num_blocks() const {
    const AttentionSizes& s = slopes_of.s;
    return s.batch * s.num_kv_heads * s.tiles_of(s.kv_len);
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const AttentionSizes& s = slopes_of.s;
    const std::int64_t of_head = s.tiles_of(s.kv_len), kv_head = team.block() / of_head % s.num_kv_heads;
    const std::int64_t key = team.block() % of_head * s.tile,
                       sequence = team.block() / of_head / s.num_kv_heads;
    const int cols = static_cast<int>(s.kv_len - key < s.tile ? s.kv_len - key : s.tile);
    const std::int64_t first_key = sequence * s.kv_batch_stride + key, kv_column = kv_head * s.head_dim;
    const int stride = s.head_dim + 1, score_stride = s.tile + 1, area = s.tile * stride;
    F* const queries = reinterpret_cast<F*>(team.shared());
    F *const gradients = queries + area, *const keys = gradients + area, *const values = keys + area,
             *const key_sums = values + area, *const value_sums = key_sums + area,
             *const scores = value_sums + area, *const slopes = scores + s.tile * score_stride;

    load_tile(team, k, false, first_key, kv_column, cols, s.head_dim, keys, stride);
    load_tile(team, v, false, first_key, kv_column, cols, s.head_dim, values, stride);
    begin_sums(team, s.accumulate, dk, first_key, kv_column, cols, s.head_dim, key_sums, stride);
    begin_sums(team, s.accumulate, dv, first_key, kv_column, cols, s.head_dim, value_sums, stride);
    const std::int64_t heads = s.num_heads / s.num_kv_heads;
    const std::int64_t behind = key * s.k_step - s.q_offset,
                       first_query = behind < 0 ? 0 : behind / s.q_step / s.tile * s.tile;
    for (std::int64_t head = kv_head * heads; head < (kv_head + 1) * heads; ++head)
      for (std::int64_t query = first_query; query < s.q_len; query += s.tile) {
        const int rows = static_cast<int>(s.q_len - query < s.tile ? s.q_len - query : s.tile);
        const KeyRange seen = keys_of(s, sequence, query, rows);
        if (seen.begin >= key + cols || seen.end <= key) continue;
        const std::int64_t first_row = sequence * s.q_len + query, column = head * s.head_dim;
        team.sync();
        load_tile(team, q, false, first_row, column, rows, s.head_dim, queries, stride);
        load_tile(team, dout, false, first_row, column, rows, s.head_dim, gradients, stride);
        clear_tile(team, scores, rows, cols, score_stride);
        clear_tile(team, slopes, rows, cols, score_stride);
        team.sync();
        add_tile_product(team, TileOperand<F>{queries, stride, 1}, TileOperand<F>{keys, stride, 1}, rows,
                         cols, s.head_dim, scores, score_stride);
        add_tile_product(team, TileOperand<F>{gradients, stride, 1}, TileOperand<F>{values, stride, 1}, rows,
                         cols, s.head_dim, slopes, score_stride);
        team.sync();
        slopes_of(team, sequence, head, query, key, rows, cols, scores, slopes);
        team.sync();
        add_tile_product(team, TileOperand<F>{scores, 1, score_stride}, TileOperand<F>{gradients, 1, stride},
                         cols, s.head_dim, rows, value_sums, stride);
        add_tile_product(team, TileOperand<F>{slopes, 1, score_stride}, TileOperand<F>{queries, 1, stride},
                         cols, s.head_dim, rows, key_sums, stride);
      }
    team.sync();
    store_tile(team, key_sums, stride, dk, first_key, kv_column, cols, s.head_dim);
    store_tile(team, value_sums, stride, dv, first_key, kv_column, cols, s.head_dim);
  }
};

}  // namespace echelon::rows
