// The gradients of bf16 attention on tensor cores, in two passes as described at AttentionSlopes: one for the
// gradients of queries, one for those of keys and values. Each recomputes the scores, so that one warp
// computes each sum, and no atomics are needed. Sums are f32; softmaxes and gradients of scores are rounded
// to bf16 for the products that read them.
#pragma once

#include "tensor/rows/warp_attention.h"

namespace echelon::rows {

// Products of queries and keys become softmaxes p, and `slopes` (on entry dout.v) become the gradients of
// these products, without their scale. of(i, j, e): the query's log-sum-exp times log2_of_e, and its delta.
// `all`: every query sees every key; else sees(i, j, e) decides.
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

// Stores `factor` times a warp's sums in their rows, or adds them if s.accumulate; there are `width` columns.
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

// dq: a block for each tile of queries of a head, `strips` times 16 queries per warp, against `keys` keys at
// a time.
template <int width, int strips, int keys, bool warpgroup>
struct WarpAttentionBackwardQueries {
  AttentionSizes s;
  Matrix<bf16> q, k, v, dout, dq;
  const float *lse, *delta;

  static constexpr int blocks_at_once = width == 64 && warpgroup ? 4 : 1;
  int heads_together() const { return query_heads_together<bf16>(s); }
  ECHELON_HOST_DEVICE static constexpr int tile_of(std::int64_t lanes) {
    return rows_of_block(lanes, strips);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return SharedRoom::bytes_for(2 * tile_of(lanes) + 2 * keys, width);
  }
  std::int64_t num_blocks() const { return s.batch * s.num_heads * s.tiles_of(s.q_len); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = warp_of<warpgroup>(team);
    const QueryTile at(s, team.block());
    const int row = warp.number() * 16 * strips, tile = tile_of(team.lanes());
    SharedRoom room(team.shared());
    const SharedRows queries = room.take(tile, width), gradients = room.take(tile, width),
                     tile_keys = room.take(keys, width), values = room.take(keys, width);

    const KeyTiles<keys, SharedRows> tiles(team, s, at);
    const HeadColumns<width> of_k(team, k, at.kv_column, s.head_dim), of_v(team, v, at.kv_column, s.head_dim);
    HeadColumns<width>(team, q, at.column, s.head_dim).fetch(team, at.first_row, at.rows, queries, tile);
    HeadColumns<width>(team, dout, at.column, s.head_dim).fetch(team, at.first_row, at.rows, gradients, tile);
    if (tiles.begin < tiles.end) tiles.fetch(team, of_v, tiles.begin, values);

    const SeenKeys<strips> seen(warp, s, at, row);
    const ScoreFactors factors(s);
    const int end_key = end_key_together<strips>(warp, s, at);
    float row_lse[strips][2], row_delta[strips][2];
    each_row_of_sums<strips>([&](int i, int half) {
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      const std::int64_t softmax = s.softmax(at.sequence, at.head, at.query + mine);
      row_lse[i][half] = mine < at.rows ? lse[softmax] * log2_of_e : 0.0f;
      row_delta[i][half] = mine < at.rows ? delta[softmax] : 0.0f;
    });

    SumFragment sums[strips][width / 8] = {};
    for (int key = tiles.begin; key < tiles.end; key += keys) {
      warp.arrive();
      team.sync();  // the values have arrived, and all are done with the last keys
      tiles.fetch(team, of_k, key, tile_keys);
      SumFragment slopes[strips][keys / 8];
      if (key < end_key) {
        begin_products(warp);
        product_of_turned<strips, keys, width>(warp, gradients, row, values, slopes);
        end_products(warp, slopes);
      }
      warp.arrive();
      team.sync();  // the keys have arrived, and all are done with the values
      if (key + keys < tiles.end) tiles.fetch(team, of_v, key + keys, values);
      if (key >= end_key) continue;
      SumFragment scores[strips][keys / 8];
      begin_products(warp);
      product_of_turned<strips, keys, width>(warp, queries, row, tile_keys, scores);
      end_products(warp, scores);
      make_slopes(
          warp, factors, scores, slopes,
          [&](int i, int, int e) {
            return OfQuery{row_lse[i][e / 2], row_delta[i][e / 2]};
          },
          seen.all(key, keys),
          [&](int i, int j, int e) {
            return seen.has(i, e / 2, key + 8 * j + fragment_column(warp.lane(), e));
          });
      Weights<strips, keys> weights(warp, slopes);
      begin_products(warp, weights.all, sums);
      add_product_of_weights<strips, keys, width>(warp, weights, tile_keys, 0, sums);
      end_products(warp, sums);
    }
    warp.arrive();  // needed if there was no key
    store_sums<strips, width>(warp, s, sums, static_cast<float>(s.scale), row, at.rows, s.head_dim, dq,
                              at.first_row, at.column);
  }
};

// dk and dv: a block for each tile of keys of a key/value head, `strips` times 16 keys per warp, over the
// query heads that read it and the queries that may see the keys, `queries` at a time. A head wider than
// `columns` is divided over several blocks, with `columns` columns each, all of which compute all scores.
// While one tile of queries is processed, the next is being loaded.
template <int width, int columns, int strips, int queries, bool warpgroup>
struct WarpAttentionBackwardKeys {
  static_assert(width % columns == 0);
  AttentionSizes s;  // its tile is of keys
  Matrix<bf16> q, k, v, dout, dk, dv;
  const float *lse, *delta;

  static constexpr int blocks_at_once = width == 64 && warpgroup ? 3 : 1;
  int heads_together() const { return key_heads_together<bf16>(s); }
  ECHELON_HOST_DEVICE static constexpr int tile_of(std::int64_t lanes) {
    return rows_of_block(lanes, strips);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return SharedRoom::bytes_for(2 * tile_of(lanes) + 4 * queries, width) + 2 * sizeof(OfQueries<queries>);
  }
  std::int64_t num_blocks() const { return s.batch * s.num_kv_heads * s.tiles_of(s.kv_len) * parts(); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = warp_of<warpgroup>(team);
    const int column = static_cast<int>(team.block() % parts()) * columns;
    const KeyTile block(s, team.block() / parts());
    const int row = warp.number() * 16 * strips, tile = tile_of(team.lanes());
    SharedRoom room(team.shared());
    const SharedRows tile_keys = room.take(tile, width), values = room.take(tile, width);
    // Two tiles each of queries and of their gradients, one of which is being processed.
    const SharedRows two_queries = room.take(queries, width);
    room.take(queries, width);
    const SharedRows two_gradients = room.take(queries, width);
    room.take(queries, width);
    const auto one = [](const SharedRows& two, int stage) {
      return SharedRows{two.data + stage * SharedRows::elements(queries, width), queries};
    };
    auto* const of_queries = static_cast<OfQueries<queries>*>(room.rest());
    HeadColumns<width>(team, k, block.kv_column, s.head_dim)
        .fetch(team, block.first_row, block.rows, tile_keys, tile);
    HeadColumns<width>(team, v, block.kv_column, s.head_dim)
        .fetch(team, block.first_row, block.rows, values, tile);
    const HeadColumns<width> of_q(team, q, 0, s.head_dim), of_dout(team, dout, 0, s.head_dim);
    const QueryTiles<queries> tiles(s, block);
    const ScoreFactors factors(s);
    QueryNotes<queries> notes;
    const auto fetch = [&](const auto& at, int stage) {
      tiles.fetch(team, of_q, at, one(two_queries, stage));
      tiles.fetch(team, of_dout, at, one(two_gradients, stage));
    };
    auto at = tiles.first(team);
    if (tiles.has(at)) {
      fetch(at, 0);
      notes.take(team, s, lse, delta, block.sequence, at);
      notes.leave(team, of_queries[0]);
    }
    const RowsTogether together = rows_together<strips>(warp);
    SumFragment key_sums[strips][columns / 8] = {}, value_sums[strips][columns / 8] = {};
    for (int stage = 0; tiles.has(at); stage = 1 - stage) {
      warp.arrive();
      team.sync();  // the queries have arrived, and all are done with the last
      const auto next = tiles.behind(team, at);
      if (tiles.has(next)) {
        fetch(next, 1 - stage);
        notes.take(team, s, lse, delta, block.sequence, next);
      }
      if (block.key + together.begin < at.end_key) {
        const int first_key = block.key + row, end_key = first_key + 16 * strips;  // of the warp
        const SharedRows tile_queries = one(two_queries, stage), gradients = one(two_gradients, stage);
        const OfQueries<queries>& of = of_queries[stage];
        SumFragment slopes[strips][queries / 8], scores[strips][queries / 8];
        begin_products(warp);
        product_of_turned<strips, queries, width>(warp, values, row, gradients, slopes);
        product_of_turned<strips, queries, width>(warp, tile_keys, row, tile_queries, scores);
        end_products(warp, slopes, scores);
        make_slopes(
            warp, factors, scores, slopes,
            [&](int, int j, int e) { return of.pairs[4 * j + warp.lane() % 4].of[e % 2]; },
            at.rows == queries && at.latest_first <= first_key && end_key <= end_key_of(s, at.query),
            [&](int i, int j, int e) {
              const int query = 8 * j + fragment_column(warp.lane(), e);
              const int its = first_key + 16 * i + fragment_row(warp.lane(), e);
              return its >= of.first[query] && its < of.end[query];
            });
        Weights<strips, queries> weights(warp, scores), of_slopes(warp, slopes);
        begin_products(warp, weights.all, of_slopes.all, value_sums, key_sums);
        add_product_of_weights<strips, queries, columns>(warp, weights, gradients, column, value_sums);
        add_product_of_weights<strips, queries, columns>(warp, of_slopes, tile_queries, column, key_sums);
        end_products(warp, value_sums, key_sums);
      }
      if (tiles.has(next)) notes.leave(team, of_queries[1 - stage]);
      at = next;
    }
    warp.arrive();  // needed if there was no query
    store_sums<strips, columns>(warp, s, key_sums, static_cast<float>(s.scale), row, block.rows,
                                s.head_dim - column, dk, block.first_row, block.kv_column + column);
    store_sums<strips, columns>(warp, s, value_sums, 1.0f, row, block.rows, s.head_dim - column, dv,
                                block.first_row, block.kv_column + column);
  }

 private:
  // How many blocks share a head.
  ECHELON_HOST_DEVICE int parts() const {
    return width == columns ? 1 : (s.head_dim + columns - 1) / columns;
  }
};

}  // namespace echelon::rows
