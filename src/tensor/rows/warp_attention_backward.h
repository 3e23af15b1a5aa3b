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

// Products of queries and keys become softmaxes p, and `slopes`, dout.v until now, the gradients of these
// products, without their scale. of(i, j, e) is what a sum's query has: a log-sum-exp, times log2_of_e, and a
// delta. `all`: each query sees each key; else sees(i, j, e) says so.
struct OfQuery {
  float lse, delta;
};
template <int strips, int fragments, class Warp, class Of, class Sees>
ECHELON_HOST_DEVICE void make_slopes(const Warp& warp, const ScoreFactors& factors,
                                     SumFragment (&scores)[strips][fragments],
                                     SumFragment (&slopes)[strips][fragments], const Of& of, bool all,
                                     const Sees& sees) {
  if (factors.capped)
    each_sum<strips, fragments>([&](int i, int j, int e) {
      float &score = scores[i][j].sums[e], &ds = slopes[i][j].sums[e];
      const float bent = tanh_of(warp, score * factors.inner);
      score = factors.cap * bent;
      ds = (ds - of(i, j, e).delta) * (1 - bent * bent);
    });
  else
    each_sum<strips, fragments>([&](int i, int j, int e) { slopes[i][j].sums[e] -= of(i, j, e).delta; });
  const float factor = factors.capped ? 1.0f : factors.factor;
  each_sum<strips, fragments>([&](int i, int j, int e) {
    float& p = scores[i][j].sums[e];
    p = warp.power_of_two(std::fma(p, factor, -of(i, j, e).lse));
    slopes[i][j].sums[e] *= p;
  });
  if (all) return;
  each_sum<strips, fragments>([&](int i, int j, int e) {
    if (!sees(i, j, e)) scores[i][j].sums[e] = slopes[i][j].sums[e] = 0;
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

// dq, a block for each tile of queries of a head, and of its columns: `strips` times 16 queries to a warp,
// against `keys` at a time.
template <int columns, bool whole, int strips, int keys>
struct WarpAttentionBackwardQueries {
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
    const ScoreFactors factors(s);
    // The last of a warp's queries sees keys below this.
    const int rows_end = at.rows < row + 16 * strips ? at.rows : row + 16 * strips;
    const int warp_end = rows_end > row ? static_cast<int>(s.end_key(at.query + rows_end - 1)) : 0;
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
      if (key < warp_end) add_product_of_turned<strips, keys>(warp, gradients, row, values, depth, slopes);
      warp.arrive();
      team.sync();  // the keys are there, and all are done with the values
      if (key + keys < tiles.end) tiles.fetch(team, v, key + keys, head_dim, values);
      if (key >= warp_end) continue;
      SumFragment scores[strips][keys / 8] = {};
      add_product_of_turned<strips, keys>(warp, queries, row, tile_keys, depth, scores);
      make_slopes(
          warp, factors, scores, slopes,
          [&](int i, int, int e) {
            return OfQuery{row_lse[i][e / 2], row_delta[i][e / 2]};
          },
          seen.all(key, keys),
          [&](int i, int j, int e) {
            return seen.has(i, e / 2, key + 8 * j + fragment_column(warp.lane(), e));
          });
      add_product_of_weights<strips, keys, columns>(warp, slopes, tile_keys, column, depth, sums);
    }
    warp.arrive();  // where there was no key
    store_sums<strips, columns>(warp, s, sums, static_cast<float>(s.scale), row, at.rows, head_dim - column,
                                dq, at.first_row, at.column + column);
  }
};

// The first keys of some queries: of that which sees most, and of that which sees fewest.
struct FirstKeys {
  int earliest, latest;
};
template <class Team>
ECHELON_HOST_DEVICE FirstKeys first_keys_of(const Team& team, const AttentionSizes& s, int sequence,
                                            int query, int rows) {
  if (s.first_keys == nullptr) return {0, 0};
  // Two numbers in one, for one reduction: the other is negative, so that of both the smallest is sought.
  const auto packed = [](std::int64_t earliest, std::int64_t less) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(earliest) << 32 |
                                     static_cast<std::uint32_t>(less));
  };
  int earliest = static_cast<int>(s.kv_len), less = 0;
  for (int i = static_cast<int>(team.lane()); i < rows; i += static_cast<int>(team.lanes())) {
    const auto first = static_cast<int>(s.first_key(sequence, query + i));
    earliest = Smaller()(earliest, first);
    less = Smaller()(less, -first);
  }
  const std::int64_t both = team.reduce(packed(earliest, less), [&](std::int64_t a, std::int64_t b) {
    return packed(Smaller()(a >> 32, b >> 32), Smaller()(static_cast<int>(a), static_cast<int>(b)));
  });
  return {static_cast<int>(both >> 32), -static_cast<int>(both)};
}

// dk and dv, a block for each tile of keys of a key/value head, and of its columns, `strips` times 16 keys to
// a warp: over the query heads that read it, and over the queries that may see the keys, `queries` at a time.
// While one tile of queries is worked on, the next is on its way.
template <int columns, bool whole, int strips, int queries>
struct WarpAttentionBackwardKeys {
  AttentionSizes s;  // whose tile is of keys
  Matrix<bf16> q, k, v, dout, dk, dv;
  const float *lse, *delta;

  static int keys(std::int64_t lanes) { return static_cast<int>(lanes) / warp_lanes * 16 * strips; }
  static std::size_t shared_bytes(std::int64_t lanes, int head_dim) {
    return warp_attention_bytes(2 * keys(lanes) + 4 * queries, head_dim) + 2 * sizeof(OfQueries);
  }
  std::int64_t num_blocks() const {
    return s.batch * s.num_kv_heads * s.tiles_of(s.kv_len) * column_parts(s.head_dim, columns);
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = team.warp();
    const int parts = whole ? 1 : column_parts(s.head_dim, columns);
    const int column = static_cast<int>(team.block() % parts) * columns;
    // Of all heads the first keys first, which the most queries see.
    const std::int64_t block = team.block() / parts, all_heads = s.batch * s.num_kv_heads;
    const auto kv_head = static_cast<int>(block % all_heads % s.num_kv_heads);
    const auto sequence = static_cast<int>(block % all_heads / s.num_kv_heads);
    const auto key = static_cast<int>(block / all_heads * s.tile);
    const auto rows = static_cast<int>(s.kv_len - key < s.tile ? s.kv_len - key : s.tile);
    const int head_dim = whole ? columns : s.head_dim, depth = padded_head(head_dim);
    const int stride = SharedRows::stride_of(depth), row = warp.number() * 16 * strips;
    const std::int64_t first_row = sequence * s.kv_batch_stride + key, kv_column = kv_head * head_dim;
    OfQueries* const of_queries = reinterpret_cast<OfQueries*>(team.shared());
    const SharedRows tile_keys{reinterpret_cast<bf16*>(team.shared() + 2 * sizeof(OfQueries)), stride};
    const SharedRows values{tile_keys.at(s.tile, 0), stride};
    const SharedRows all_queries{values.at(s.tile, 0), stride},
        all_gradients{all_queries.at(2 * queries, 0), stride};
    const auto half = [&](const SharedRows& of, int stage) {
      return SharedRows{of.at(stage * queries, 0), stride};
    };
    const auto fetch = [&](const Place& at, int stage) {
      const std::int64_t from = sequence * s.q_len + at.query, from_column = at.head * head_dim;
      fetch_rows(team, q, from, from_column, at.rows, head_dim, half(all_queries, stage), queries, depth);
      fetch_rows(team, dout, from, from_column, at.rows, head_dim, half(all_gradients, stage), queries,
                 depth);
      note_queries(team, sequence, at, of_queries[stage]);
    };
    fetch_rows(team, k, first_row, kv_column, rows, head_dim, tile_keys, s.tile, depth);
    fetch_rows(team, v, first_row, kv_column, rows, head_dim, values, s.tile, depth);

    const auto heads = static_cast<int>(s.num_heads / s.num_kv_heads);
    const Bounds bounds{key < s.q_offset ? 0 : static_cast<int>((key - s.q_offset) / queries * queries),
                        (kv_head + 1) * heads, key, key + rows};
    const ScoreFactors factors(s);
    Place at = seek(team, bounds, sequence, kv_head * heads, bounds.first_query);
    if (at.head < bounds.end_head) fetch(at, 0);
    SumFragment key_sums[strips][columns / 8] = {}, value_sums[strips][columns / 8] = {};
    for (int stage = 0; at.head < bounds.end_head; stage = 1 - stage) {
      warp.arrive();
      team.sync();  // the queries are there, and all are done with the last
      const Place next = seek(team, bounds, sequence, at.head, at.query + queries);
      if (next.head < bounds.end_head) fetch(next, 1 - stage);
      const int first_key = key + row, end_key = first_key + 16 * strips;  // of the warp
      if (first_key < at.end_key) {
        const SharedRows tile_queries = half(all_queries, stage), gradients = half(all_gradients, stage);
        const OfQueries& of = of_queries[stage];
        SumFragment slopes[strips][queries / 8] = {}, scores[strips][queries / 8] = {};
        add_product_of_turned<strips, queries>(warp, values, row, gradients, depth, slopes);
        add_product_of_turned<strips, queries>(warp, tile_keys, row, tile_queries, depth, scores);
        make_slopes(
            warp, factors, scores, slopes,
            [&](int, int j, int e) { return of.pairs[4 * j + warp.lane() % 4].of[e % 2]; },
            at.rows == queries && at.latest_first <= first_key &&
                end_key <= static_cast<int>(s.end_key(at.query)),
            [&](int i, int j, int e) {
              const int query = 8 * j + fragment_column(warp.lane(), e);
              const int its = first_key + 16 * i + fragment_row(warp.lane(), e);
              return its >= of.first[query] && its < of.end[query];
            });
        add_product_of_weights<strips, queries, columns>(warp, scores, gradients, column, depth, value_sums);
        add_product_of_weights<strips, queries, columns>(warp, slopes, tile_queries, column, depth, key_sums);
      }
      at = next;
    }
    warp.arrive();  // where there was no query
    store_sums<strips, columns>(warp, s, key_sums, static_cast<float>(s.scale), row, rows, head_dim - column,
                                dk, first_row, kv_column + column);
    store_sums<strips, columns>(warp, s, value_sums, 1.0f, row, rows, head_dim - column, dv, first_row,
                                kv_column + column);
  }

 private:
  // Of a tile's queries; what is not there sees no key.
  struct OfQueries {
    struct alignas(16) Pair {
      OfQuery of[2];
    };
    Pair pairs[queries / 2];
    int first[queries], end[queries];
  };
  static_assert(sizeof(OfQueries) % 16 == 0);
  // A tile of queries: how many there are, where the first keys of them lie, at most, and how many keys the
  // last sees.
  struct Place {
    int head, query, rows, latest_first, end_key;
  };
  struct Bounds {
    int first_query, end_head, key, end_key;
  };

  // The next tile of queries, from that one on, of which one may see a key of the block's.
  template <class Team>
  ECHELON_HOST_DEVICE Place seek(const Team& team, const Bounds& bounds, int sequence, int head,
                                 int query) const {
    const auto q_len = static_cast<int>(s.q_len);
    for (; head < bounds.end_head; ++head, query = bounds.first_query)
      for (; query < q_len; query += queries) {
        const int rows = q_len - query < queries ? q_len - query : queries;
        const auto end_key = static_cast<int>(s.end_key(query + rows - 1));
        if (end_key <= bounds.key) continue;
        const FirstKeys first = first_keys_of(team, s, sequence, query, rows);
        if (first.earliest < bounds.end_key) return {head, query, rows, first.latest, end_key};
      }
    return {head, 0, 0, 0, 0};
  }

  template <class Team>
  ECHELON_HOST_DEVICE void note_queries(const Team& team, int sequence, const Place& at,
                                        OfQueries& of) const {
    for (int i = static_cast<int>(team.lane()); i < queries; i += static_cast<int>(team.lanes())) {
      const std::int64_t query = at.query + i, softmax = s.softmax(sequence, at.head, query);
      const bool is = i < at.rows;
      of.pairs[i / 2].of[i % 2] = {is ? lse[softmax] * log2_of_e : 0.0f, is ? delta[softmax] : 0.0f};
      of.first[i] = is ? static_cast<int>(s.first_key(sequence, query)) : 0;
      of.end[i] = is ? static_cast<int>(s.end_key(query)) : 0;
    }
  }
};

}  // namespace echelon::rows
