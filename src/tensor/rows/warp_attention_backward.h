// The gradients of attention of bf16 on tensor cores, in two passes as AttentionSlopes says: one for what
// queries get, one for what keys get, each of which makes the scores again, so that every sum is one warp's
// and none needs an atomic. Sums are f32; softmaxes and the gradients of scores are rounded to bf16 for the
// products that they go into.
//
// A block sums `columns` columns of a head's gradients: a wider head is several blocks', each of which makes
// all of its scores.
#pragma once

#include "tensor/rows/warp_attention.h"

namespace echelon::rows {

// How many blocks share a head.
ECHELON_HOST_DEVICE constexpr int column_parts(int head_dim, int columns) {
  return (head_dim + columns - 1) / columns;
}

// What the scores of a query and a key are made into slopes with: whether the one sees the other, the query's
// log-sum-exp, times log2_of_e, and its delta.
struct PairOfQuery {
  bool sees;
  float lse, delta;
};
// Products of queries and keys become softmaxes p, and `slopes`, dout.v until now, the gradients of these
// products, without their scale. of(i, j, e) is the PairOfQuery of a sum.
template <int strips, int fragments, class Warp, class Of>
ECHELON_HOST_DEVICE void make_slopes(const Warp& warp, const AttentionSizes& s,
                                     SumFragment (&scores)[strips][fragments],
                                     SumFragment (&slopes)[strips][fragments], const Of& of) {
  make_scores(s, scores);
  const float of_cap = s.cap > 0 ? 1 / static_cast<float>(s.cap) : 0.0f;
  each_sum<strips, fragments>([&](int i, int j, int e) {
    float &p = scores[i][j].sums[e], &ds = slopes[i][j].sums[e];
    const PairOfQuery pair = of(i, j, e);
    const float bent = p * of_cap;  // 0 without a cap
    p = pair.sees ? warp.power_of_two(p * log2_of_e - pair.lse) : 0.0f;
    ds = pair.sees ? p * (ds - pair.delta) * (1 - bent * bent) : 0.0f;
  });
}

// Stored rows become, or with s.accumulate get, `factor` times the sums of a warp, of which there are `width`
// columns.
template <int strips, int columns, class Warp>
ECHELON_HOST_DEVICE void store_sums(const Warp& warp, const AttentionSizes& s,
                                    const SumFragment (&sums)[strips][columns / 8], float factor, int row,
                                    int rows, int width, const Matrix<bf16>& to, std::int64_t first_row,
                                    std::int64_t column) {
  each_row_of_sums<strips>([&](int i, int half) {
    const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
    if (mine >= rows) return;
    each_pair_of_row<columns / 8>(half, width, warp.lane(), [&](int j, int e, int d) {
      bf16* const at = to[first_row + mine] + column + d;
      float x = factor * sums[i][j].sums[e], y = factor * sums[i][j].sums[e + 1];
      if (s.accumulate) x += float{at[0]}, y += float{at[1]};
      store_pair(warp, x, y, at);
    });
  });
}

// dq, a block for each tile of queries of a head, and of its columns.
template <int columns, bool whole>
struct WarpAttentionBackwardQueries {
  static constexpr int keys = 64, strips = 1;
  AttentionSizes s;
  Matrix<bf16> q, k, v, dout, dq;
  const float *lse, *delta;

  static int queries(std::int64_t lanes) { return static_cast<int>(lanes) / warp_lanes * 16 * strips; }
  static std::size_t shared_bytes(std::int64_t lanes, int head_dim) {
    return warp_attention_bytes(2 * queries(lanes) + 2 * keys, head_dim);
  }
  std::int64_t num_blocks() const {
    return s.batch * s.num_heads * s.tiles_of(s.q_len) * column_parts(s.head_dim, columns);
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = team.warp();
    const int parts = whole ? 1 : column_parts(s.head_dim, columns);
    const QueryTile at(s, team.block() / parts);
    const int column = static_cast<int>(team.block() % parts) * columns;
    const int head_dim = whole ? columns : s.head_dim, depth = padded_head(head_dim);
    const int stride = SharedRows::stride_of(depth), row = warp.number() * 16 * strips;
    const SharedRows queries{reinterpret_cast<bf16*>(team.shared()), stride};
    const SharedRows gradients{queries.at(s.tile, 0), stride};
    const SharedRows tile_keys{gradients.at(s.tile, 0), stride}, values{tile_keys.at(keys, 0), stride};

    const KeyTiles tiles(team, s, at, keys);
    fetch_rows(team, q, at.first_row, at.column, at.rows, head_dim, queries, s.tile, depth);
    fetch_rows(team, dout, at.first_row, at.column, at.rows, head_dim, gradients, s.tile, depth);
    if (tiles.begin < tiles.end) tiles.fetch(team, v, tiles.begin, head_dim, values);

    const SeenKeys<strips> seen(warp, s, at, row);
    float row_lse[strips][2], row_delta[strips][2];
    each_row_of_sums<strips>([&](int i, int half) {
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      const std::int64_t softmax = s.softmax(at.sequence, at.head, at.query + mine);
      row_lse[i][half] = mine < at.rows ? lse[softmax] * log2_of_e : 0.0f;
      row_delta[i][half] = mine < at.rows ? delta[softmax] : 0.0f;
    });

    SumFragment sums[strips][columns / 8] = {};
    for (int key = tiles.begin; key < tiles.end; key += keys) {
      warp.arrive();
      team.sync();  // the values are there, and all are done with the last keys
      tiles.fetch(team, k, key, head_dim, tile_keys);
      SumFragment slopes[strips][keys / 8] = {};
      add_product_of_turned<strips, keys>(warp, gradients, row, values, depth, slopes);
      warp.arrive();
      team.sync();  // the keys are there, and all are done with the values
      if (key + keys < tiles.end) tiles.fetch(team, v, key + keys, head_dim, values);
      SumFragment scores[strips][keys / 8] = {};
      add_product_of_turned<strips, keys>(warp, queries, row, tile_keys, depth, scores);
      const bool all = seen.all(key, keys);
      make_slopes(warp, s, scores, slopes, [&](int i, int j, int e) {
        const int its = key + 8 * j + fragment_column(warp.lane(), e);
        return PairOfQuery{all || seen.has(i, e / 2, its), row_lse[i][e / 2], row_delta[i][e / 2]};
      });
      add_product_of_weights<strips, keys, columns>(warp, slopes, tile_keys, column, depth, sums);
    }
    warp.arrive();  // where there was no key
    store_sums<strips, columns>(warp, s, sums, static_cast<float>(s.scale), row, at.rows, head_dim - column,
                                dq, at.first_row, at.column + column);
  }
};

// dk and dv, a block for each tile of keys of a key/value head, and of its columns: over the query heads that
// read it, and over the queries that may see the keys, `queries` at a time.
template <int columns, bool whole, int queries>
struct WarpAttentionBackwardKeys {
  AttentionSizes s;  // whose tile is of keys
  Matrix<bf16> q, k, v, dout, dk, dv;
  const float *lse, *delta;

  static int keys(std::int64_t lanes) { return static_cast<int>(lanes) / warp_lanes * 16; }
  static std::size_t shared_bytes(std::int64_t lanes, int head_dim) {
    return warp_attention_bytes(2 * keys(lanes) + 2 * queries, head_dim) + sizeof(OfQueries);
  }
  std::int64_t num_blocks() const {
    return s.batch * s.num_kv_heads * s.tiles_of(s.kv_len) * column_parts(s.head_dim, columns);
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = team.warp();
    const int parts = whole ? 1 : column_parts(s.head_dim, columns);
    const int column = static_cast<int>(team.block() % parts) * columns;
    const std::int64_t tile = team.block() / parts, of_head = s.tiles_of(s.kv_len);
    const std::int64_t kv_head = tile / of_head % s.num_kv_heads, sequence = tile / of_head / s.num_kv_heads;
    const auto key = static_cast<int>(tile % of_head * s.tile);
    const auto rows = static_cast<int>(s.kv_len - key < s.tile ? s.kv_len - key : s.tile);
    const int head_dim = whole ? columns : s.head_dim, depth = padded_head(head_dim);
    const int stride = SharedRows::stride_of(depth), row = warp.number() * 16;
    const std::int64_t first_row = sequence * s.kv_batch_stride + key, kv_column = kv_head * head_dim;
    OfQueries& of_queries = *reinterpret_cast<OfQueries*>(team.shared());
    const SharedRows tile_keys{reinterpret_cast<bf16*>(team.shared() + sizeof(OfQueries)), stride};
    const SharedRows values{tile_keys.at(s.tile, 0), stride};
    const SharedRows tile_queries{values.at(s.tile, 0), stride},
        gradients{tile_queries.at(queries, 0), stride};

    const auto fetch = [&](const Matrix<bf16>& from, const Place& at, const SharedRows& to) {
      const auto there = static_cast<int>(s.q_len - at.query < queries ? s.q_len - at.query : queries);
      fetch_rows(team, from, sequence * s.q_len + at.query, at.head * head_dim, there, head_dim, to, queries,
                 depth);
    };
    fetch_rows(team, k, first_row, kv_column, rows, head_dim, tile_keys, s.tile, depth);
    fetch_rows(team, v, first_row, kv_column, rows, head_dim, values, s.tile, depth);

    const std::int64_t heads = s.num_heads / s.num_kv_heads;
    const std::int64_t first_query = key < s.q_offset ? 0 : (key - s.q_offset) / queries * queries;
    const Bounds bounds{first_query, (kv_head + 1) * heads};
    Place at = seek(team, bounds, sequence, key, rows, {kv_head * heads, first_query});
    if (at.head < bounds.end_head) {
      fetch(dout, at, gradients);
      note_queries(team, sequence, at, of_queries);
    }
    SumFragment key_sums[1][columns / 8] = {}, value_sums[1][columns / 8] = {};
    while (at.head < bounds.end_head) {
      warp.arrive();
      team.sync();  // the gradients are there, and all are done with the last queries
      fetch(q, at, tile_queries);
      SumFragment slopes[1][queries / 8] = {}, scores[1][queries / 8] = {};
      add_product_of_turned<1, queries>(warp, values, row, gradients, depth, slopes);
      warp.arrive();
      team.sync();  // the queries are there
      add_product_of_turned<1, queries>(warp, tile_keys, row, tile_queries, depth, scores);
      const bool all = s.first_keys == nullptr && at.query + queries <= s.q_len &&
                       key + s.tile <= static_cast<int>(s.end_key(at.query));
      make_slopes(warp, s, scores, slopes, [&](int, int j, int e) {
        const int query = 8 * j + fragment_column(warp.lane(), e);
        const int its = key + row + fragment_row(warp.lane(), e);
        return PairOfQuery{all || (its >= of_queries.first[query] && its < of_queries.end[query]),
                           of_queries.lse[query], of_queries.delta[query]};
      });
      add_product_of_weights<1, queries, columns>(warp, scores, gradients, column, depth, value_sums);
      const Place next = seek(team, bounds, sequence, key, rows, {at.head, at.query + queries});
      team.sync();  // all are done with the gradients
      if (next.head < bounds.end_head) {
        fetch(dout, next, gradients);
        note_queries(team, sequence, next, of_queries);
      }
      add_product_of_weights<1, queries, columns>(warp, slopes, tile_queries, column, depth, key_sums);
      at = next;
    }
    warp.arrive();  // where there was no query
    store_sums<1, columns>(warp, s, key_sums, static_cast<float>(s.scale), row, rows, head_dim - column, dk,
                           first_row, kv_column + column);
    store_sums<1, columns>(warp, s, value_sums, 1.0f, row, rows, head_dim - column, dv, first_row,
                           kv_column + column);
  }

 private:
  // Of a tile's queries; what is not there sees no key.
  struct OfQueries {
    float lse[queries], delta[queries];
    int first[queries], end[queries];
  };
  static_assert(sizeof(OfQueries) % 16 == 0);
  struct Place {
    std::int64_t head, query;
  };
  struct Bounds {
    std::int64_t first_query, end_head;
  };

  // The next tile of queries, from `at` on, of which one may see a key of the block's.
  template <class Team>
  ECHELON_HOST_DEVICE Place seek(const Team& team, const Bounds& bounds, std::int64_t sequence, int key,
                                 int rows, Place at) const {
    for (; at.head < bounds.end_head; ++at.head, at.query = bounds.first_query)
      for (; at.query < s.q_len; at.query += queries) {
        const auto there = static_cast<int>(s.q_len - at.query < queries ? s.q_len - at.query : queries);
        if (s.end_key(at.query + there - 1) > key &&
            first_key_of(team, s, sequence, at.query, there) < key + rows)
          return at;
      }
    return at;
  }

  template <class Team>
  ECHELON_HOST_DEVICE void note_queries(const Team& team, std::int64_t sequence, const Place& at,
                                        OfQueries& of) const {
    for (int i = static_cast<int>(team.lane()); i < queries; i += static_cast<int>(team.lanes())) {
      const std::int64_t query = at.query + i, softmax = s.softmax(sequence, at.head, query);
      const bool is = query < s.q_len;
      of.lse[i] = is ? lse[softmax] * log2_of_e : 0.0f;
      of.delta[i] = is ? delta[softmax] : 0.0f;
      of.first[i] = is ? static_cast<int>(s.first_key(sequence, query)) : 0;
      of.end[i] = is ? static_cast<int>(s.end_key(query)) : 0;
    }
  }
};

}  // namespace echelon::rows
