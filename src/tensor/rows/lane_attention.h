// Causal attention in f32 on ordinary cores, in the form of FlashAttention-2 (Dao 2023,
// https://arxiv.org/abs/2307.08691): each lane of a block has a patch of the scores, and one of the sums, in
// registers. Implements Kernels::attention. All numbers are f32. Each output is written by one block, so the
// same call has the same bits.
#pragma once

#include <cmath>

#include "tensor/rows/attention_tiles.h"
#include "tensor/rows/columns.h"

namespace echelon::rows {

// Rows of floats in shared memory, with 16 bytes of padding, so that the same 16 bytes of eight neighbouring
// rows are in different banks.
template <int width>
struct LaneRows {
  static_assert(width % 32 == 0);
  using Element = float;
  static constexpr int panel = width, stride = width + 4;

  float* data;
  ECHELON_HOST_DEVICE float* at(int row, int column) const { return data + row * stride + column; }
  ECHELON_HOST_DEVICE Values<float, 4> four(int row, int column) const {
    return Columns<4>{column}.read(data + row * stride);
  }
  // The memory after `rows` rows.
  template <class Next>
  ECHELON_HOST_DEVICE Next behind(int rows) const {
    return {data + rows * stride};
  }
  static constexpr std::size_t bytes_for(int rows) {
    return sizeof(float) * static_cast<std::size_t>(rows * stride);
  }
};

inline constexpr int lane_rows = 4;
// A lane's place: it has lane_rows rows, and eight lanes have an eighth of the columns each.
struct LanePlace {
  static constexpr int across = 8, down = warp_lanes / across;
  int first_row, end_row;  // of the warp
  int row, column;
  template <class Warp>
  ECHELON_HOST_DEVICE explicit LanePlace(const Warp& warp)
      : first_row(warp.number() * down * lane_rows),
        end_row(first_row + down * lane_rows),
        row(first_row + warp.lane() / across),
        column(warp.lane() % across) {}
  ECHELON_HOST_DEVICE int row_of(int i) const { return row + down * i; }
  // A lane's columns: single ones for scores, groups of four for sums.
  ECHELON_HOST_DEVICE int column_of(int j) const { return column + across * j; }
  ECHELON_HOST_DEVICE int four_of(int j) const { return 4 * column_of(j); }
  // The sum, or maximum, over the lanes that share a row.
  template <class Warp, class Op>
  ECHELON_HOST_DEVICE static float of_row(const Warp& warp, float x, const Op& op) {
    ECHELON_UNROLL
    for (int apart = 1; apart < across; apart *= 2) x = op(x, warp.across(x, apart));
    return x;
  }
  ECHELON_HOST_DEVICE static constexpr int rows_of_block(std::int64_t lanes) {
    return static_cast<int>(lanes) / across * lane_rows;
  }
};

template <int wide, class Body>
ECHELON_HOST_DEVICE void each_of_patch(const Body& body) {
  ECHELON_UNROLL
  for (int i = 0; i < lane_rows; ++i) {
    ECHELON_UNROLL
    for (int j = 0; j < wide; ++j) body(i, j);
  }
}

// products[i][j] = a lane's row i of left times its row j of right.
template <int wide, int width>
ECHELON_HOST_DEVICE void products_of_rows(const LanePlace& at, const LaneRows<width>& left,
                                          const LaneRows<width>& right, float (&products)[lane_rows][wide]) {
  each_of_patch<wide>([&](int i, int j) { products[i][j] = 0; });
  ECHELON_UNROLL_TWICE
  for (int d = 0; d < width; d += 4) {
    Values<float, 4> a[lane_rows];
    ECHELON_UNROLL
    for (int i = 0; i < lane_rows; ++i) a[i] = left.four(at.row_of(i), d);
    ECHELON_UNROLL
    for (int j = 0; j < wide; ++j) {
      const Values<float, 4> b = right.four(at.column_of(j), d);
      each_of_patch<4>([&](int i, int e) { products[i][j] += a[i][e] * b[e]; });
    }
  }
}

// sums += a lane's rows of weights times its columns of the first `depth` rows of right.
template <int depth, int width>
ECHELON_HOST_DEVICE void add_product_of_lanes(const LanePlace& at, const LaneRows<depth>& weights,
                                              const LaneRows<width>& right,
                                              float (&sums)[lane_rows][width / 8]) {
  ECHELON_UNROLL_TWICE
  for (int k = 0; k < depth; k += 4) {
    Values<float, 4> a[lane_rows];
    ECHELON_UNROLL
    for (int i = 0; i < lane_rows; ++i) a[i] = weights.four(at.row_of(i), k);
    ECHELON_UNROLL
    for (int of = 0; of < 4; ++of) {
      ECHELON_UNROLL
      for (int j = 0; j < width / 32; ++j) {
        const Values<float, 4> b = right.four(k + of, at.four_of(j));
        each_of_patch<4>([&](int i, int e) { sums[i][4 * j + e] += a[i][of] * b[e]; });
      }
    }
  }
}

template <int wide, int keys>
ECHELON_HOST_DEVICE void leave_weights(const LanePlace& at, const float (&weights)[lane_rows][wide],
                                       const LaneRows<keys>& to) {
  each_of_patch<wide>([&](int i, int j) { *to.at(at.row_of(i), at.column_of(j)) = weights[i][j]; });
}

// For a lane's rows among the first `rows`: sets each element of row i to make(i, sum, stored), given the
// stored value.
template <int width, class Make>
ECHELON_HOST_DEVICE void store_rows(const LanePlace& at, const float (&sums)[lane_rows][width / 8], int rows,
                                    int head_dim, const Matrix<float>& to, std::int64_t first_row,
                                    std::int64_t column, const Make& make) {
  ECHELON_UNROLL
  for (int i = 0; i < lane_rows; ++i) {
    if (at.row_of(i) >= rows) continue;
    float* const row = to[first_row + at.row_of(i)];
    ECHELON_UNROLL
    for (int j = 0; j < width / 32; ++j)
      if (at.four_of(j) < head_dim) {
        const Columns<4> four{column + at.four_of(j)};
        four.write(row, [&](int e) { return make(i, sums[i][4 * j + e], row + four.begin + e); });
      }
  }
}

// In units of log2.
ECHELON_HOST_DEVICE inline float score_of(const ScoreFactors& factors, float product) {
  return factors.capped ? factors.cap * std::tanh(product * factors.inner) : factors.factor * product;
}

// The keys that the queries of a lane's rows see; none for missing queries.
class LaneSees {
 public:
  ECHELON_HOST_DEVICE LaneSees(const AttentionSizes& s, const QueryTile& of, const LanePlace& at)
      : s_(s), of_(of), at_(at) {}
  // Whether all of them see all of keys [key, key + wide).
  ECHELON_HOST_DEVICE bool all(int key, int wide) const {
    bool so = true;
    ECHELON_UNROLL
    for (int i = 0; i < lane_rows; ++i) so = so && first(i) <= key && key + wide <= end(i);
    return so;
  }
  ECHELON_HOST_DEVICE int first(int i) const {
    const int row = at_.row_of(i);
    return row < of_.rows ? static_cast<int>(s_.first_key(of_.sequence, of_.query + row)) : 0;
  }
  ECHELON_HOST_DEVICE int end(int i) const {
    const int row = at_.row_of(i);
    return row < of_.rows ? end_key_of(s_, of_.query + row) : 0;
  }
  // The end of the keys that the warp's last query sees.
  ECHELON_HOST_DEVICE int end_of_warp() const {
    const int end = Smaller()(of_.rows, at_.end_row);
    return end > at_.first_row ? end_key_of(s_, of_.query + end - 1) : 0;
  }

 private:
  const AttentionSizes& s_;
  const QueryTile& of_;
  const LanePlace& at_;
};

// A block for each tile of queries of a head, against 8 `wide` keys at a time. `width`: the widest heads;
// columns beyond a head are zeros.
template <int width, int wide>
struct LaneAttention {
  static constexpr int keys = 8 * wide;
  AttentionSizes s;
  Matrix<float> q, k, v, out;
  float* lse;

  int heads_together() const { return query_heads_together<float>(s); }
  ECHELON_HOST_DEVICE static constexpr int tile_of(std::int64_t lanes) {
    return LanePlace::rows_of_block(lanes);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return LaneRows<width>::bytes_for(tile_of(lanes) + 2 * keys) + LaneRows<keys>::bytes_for(tile_of(lanes));
  }
  std::int64_t num_blocks() const { return s.batch * s.num_heads * s.tiles_of(s.q_len); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    using Rows = LaneRows<width>;
    const auto warp = team.warp();
    const QueryTile of(s, team.block());
    const LanePlace at(warp);
    const int tile = tile_of(team.lanes());
    const Rows queries{reinterpret_cast<float*>(team.shared())},
        tile_keys = queries.template behind<Rows>(tile), values = tile_keys.template behind<Rows>(keys);
    const auto weights = values.template behind<LaneRows<keys>>(keys);

    const KeyTiles<keys, Rows> tiles(team, s, of);
    const HeadColumns<width, Rows> of_k(team, k, of.kv_column, s.head_dim),
        of_v(team, v, of.kv_column, s.head_dim);
    HeadColumns<width, Rows>(team, q, of.column, s.head_dim)
        .fetch(team, of.first_row, of.rows, queries, tile);
    if (tiles.begin < tiles.end) tiles.fetch(team, of_k, tiles.begin, tile_keys);

    const LaneSees sees(s, of, at);
    const ScoreFactors factors(s);
    const int end_key = sees.end_of_warp();
    float sums[lane_rows][width / 8];
    float max[lane_rows], total[lane_rows];  // max in units of log2; total of this lane's columns
    begin(of, at, sums, max, total);

    for (int key = tiles.begin; key < tiles.end; key += keys) {
      warp.arrive();
      team.sync();  // the keys have arrived, and all are done with the last values
      tiles.fetch(team, of_v, key, values);
      float scores[lane_rows][wide];
      if (key < end_key) {
        products_of_rows(at, queries, tile_keys, scores);
        add_softmax(warp, at, sees, key, factors, scores, sums, max, total);
        leave_weights(at, scores, weights);
      }
      warp.arrive();
      team.sync();  // the values have arrived, and all are done with the keys
      if (key + keys < tiles.end) tiles.fetch(team, of_k, key + keys, tile_keys);
      if (key < end_key) add_product_of_lanes(at, weights, values, sums);
    }
    warp.arrive();  // needed if there was no key
    end(warp, of, at, sums, max, total);
  }

 private:
  static constexpr float none = -static_cast<float>(INFINITY);

  // The result of earlier calls counts as one more key, with their lse as its score and their out as its
  // value.
  ECHELON_HOST_DEVICE void begin(const QueryTile& of, const LanePlace& at,
                                 float (&sums)[lane_rows][width / 8], float (&max)[lane_rows],
                                 float (&total)[lane_rows]) const {
    ECHELON_UNROLL
    for (int i = 0; i < lane_rows; ++i) {
      const int mine = at.row_of(i);
      const float earlier =
          s.accumulate && mine < of.rows ? lse[s.softmax(of.sequence, of.head, of.query + mine)] : none;
      const bool begun = earlier != none;
      max[i] = begun ? earlier * log2_of_e : none;
      total[i] = begun && at.column == 0 ? 1.0f : 0.0f;  // one of the eight lanes that add it up
      ECHELON_UNROLL
      for (int j = 0; j < width / 32; ++j) {
        const bool is = begun && at.four_of(j) < s.head_dim;
        const auto four =
            Columns<4>{of.column + at.four_of(j)}.read_or(is ? out[of.first_row + mine] : nullptr, 0.0f);
        ECHELON_UNROLL
        for (int e = 0; e < 4; ++e) sums[i][4 * j + e] = four[e];
      }
    }
  }

  // Turns products into exponentials relative to the largest score so far, and rescales the sums so far.
  template <class Warp>
  ECHELON_HOST_DEVICE void add_softmax(const Warp& warp, const LanePlace& at, const LaneSees& sees, int key,
                                       const ScoreFactors& factors, float (&scores)[lane_rows][wide],
                                       float (&sums)[lane_rows][width / 8], float (&max)[lane_rows],
                                       float (&total)[lane_rows]) const {
    const bool all = sees.all(key, keys);
    ECHELON_UNROLL
    for (int i = 0; i < lane_rows; ++i) {
      float most = none;
      ECHELON_UNROLL
      for (int j = 0; j < wide; ++j) scores[i][j] = score_of(factors, scores[i][j]);
      if (!all) {
        const int first = sees.first(i), end = sees.end(i);
        ECHELON_UNROLL
        for (int j = 0; j < wide; ++j) {
          const int its = key + at.column_of(j);
          if (its < first || its >= end) scores[i][j] = none;
        }
      }
      ECHELON_UNROLL
      for (int j = 0; j < wide; ++j) most = std::fmax(most, scores[i][j]);
      most = at.of_row(warp, std::fmax(most, max[i]), [](float x, float y) { return std::fmax(x, y); });
      const float base = most == none ? 0.0f : most, factor = warp.power_of_two(max[i] - base);
      float of_tile = 0;
      ECHELON_UNROLL
      for (int j = 0; j < wide; ++j) of_tile += scores[i][j] = warp.power_of_two(scores[i][j] - base);
      max[i] = most;
      total[i] = total[i] * factor + of_tile;
      ECHELON_UNROLL
      for (int j = 0; j < width / 8; ++j) sums[i][j] *= factor;
    }
  }

  template <class Warp>
  ECHELON_HOST_DEVICE void end(const Warp& warp, const QueryTile& of, const LanePlace& at,
                               const float (&sums)[lane_rows][width / 8], const float (&max)[lane_rows],
                               float (&total)[lane_rows]) const {
    ECHELON_UNROLL
    for (int i = 0; i < lane_rows; ++i) {
      total[i] = at.of_row(warp, total[i], Plus());
      if (at.row_of(i) < of.rows && at.column == 0)  // without keys: -infinity
        lse[s.softmax(of.sequence, of.head, of.query + at.row_of(i))] =
            (max[i] + std::log2(total[i])) * (1 / log2_of_e);
    }
    store_rows<width>(at, sums, of.rows, s.head_dim, out, of.first_row, of.column,
                      [&](int i, float sum, float*) { return total[i] == 0 ? 0.0f : sum / total[i]; });
  }
};

}  // namespace echelon::rows
