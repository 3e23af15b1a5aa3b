// The gradients of f32 attention on ordinary cores, in two passes as described at AttentionSlopes: one for
// the gradients of queries, one for those of keys and values. Each recomputes the scores, so that one lane
// computes each sum, and no atomics are needed.
#pragma once

#include "tensor/rows/lane_attention.h"

namespace echelon::rows {

// Products of queries and keys become softmaxes p, and `slopes` (on entry dout.v) become the gradients of
// these products, without their scale. of(i, j): the lse and delta of a score's query. `all`: every query
// sees every key; else sees(i, j) decides.
template <int wide, class Warp, class Of, class Sees>
ECHELON_HOST_DEVICE void make_slopes_of_lanes(const Warp& warp, const ScoreFactors& factors,
                                              float (&scores)[lane_rows][wide],
                                              float (&slopes)[lane_rows][wide], const Of& of, bool all,
                                              const Sees& sees) {
  each_of_patch<wide>([&](int i, int j) {
    const OfQuery its = of(i, j);
    float &p = scores[i][j], &ds = slopes[i][j];
    const float score = score_of(factors, p), bent = factors.capped ? score / factors.cap : 0.0f;
    p = warp.power_of_two(score - its.lse);
    ds = (ds - its.delta) * (1 - bent * bent) * p;
  });
  if (all) return;
  each_of_patch<wide>([&](int i, int j) {
    if (!sees(i, j)) scores[i][j] = slopes[i][j] = 0;
  });
}

// Stores `factor` times a lane's sums in its rows, or adds them if s.accumulate.
template <int width>
ECHELON_HOST_DEVICE void store_lane_sums(const AttentionSizes& s, const LanePlace& at,
                                         const float (&sums)[lane_rows][width / 8], float factor, int rows,
                                         const Matrix<float>& to, std::int64_t first_row,
                                         std::int64_t column) {
  store_rows<width>(at, sums, rows, s.head_dim, to, first_row, column,
                    [&](int, float sum, const float* stored) {
                      return s.accumulate ? *stored + factor * sum : factor * sum;
                    });
}

// dq: a block for each tile of queries of a head, against 8 `wide` keys at a time.
template <int width, int wide>
struct LaneAttentionBackwardQueries {
  static constexpr int keys = 8 * wide;
  AttentionSizes s;
  Matrix<float> q, k, v, dout, dq;
  const float *lse, *delta;

  int heads_together() const { return query_heads_together<float>(s); }
  ECHELON_HOST_DEVICE static constexpr int tile_of(std::int64_t lanes) {
    return LanePlace::rows_of_block(lanes);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return LaneRows<width>::bytes_for(2 * tile_of(lanes) + 2 * keys) +
           LaneRows<keys>::bytes_for(tile_of(lanes));
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
        gradients = queries.template behind<Rows>(tile), tile_keys = gradients.template behind<Rows>(tile),
        values = tile_keys.template behind<Rows>(keys);
    const auto weights = values.template behind<LaneRows<keys>>(keys);

    const KeyTiles<keys, Rows> tiles(team, s, of);
    const HeadColumns<width, Rows> of_k(team, k, of.kv_column, s.head_dim),
        of_v(team, v, of.kv_column, s.head_dim);
    const auto fetch_mine = [&](const Matrix<float>& from, const Rows& to) {
      HeadColumns<width, Rows>(team, from, of.column, s.head_dim)
          .fetch(team, of.first_row, of.rows, to, tile);
    };
    fetch_mine(q, queries);
    fetch_mine(dout, gradients);
    if (tiles.begin < tiles.end) tiles.fetch(team, of_v, tiles.begin, values);

    const LaneSees sees(s, of, at);
    const ScoreFactors factors(s);
    const int end_key = sees.end_of_warp();
    OfQuery of_rows[lane_rows];
    ECHELON_UNROLL
    for (int i = 0; i < lane_rows; ++i) {
      const int mine = at.row_of(i);
      const std::int64_t softmax = s.softmax(of.sequence, of.head, of.query + mine);
      of_rows[i] = mine < of.rows ? OfQuery{lse[softmax] * log2_of_e, delta[softmax]} : OfQuery{0, 0};
    }

    float sums[lane_rows][width / 8] = {};
    for (int key = tiles.begin; key < tiles.end; key += keys) {
      warp.arrive();
      team.sync();  // the values have arrived, and all are done with the last keys
      tiles.fetch(team, of_k, key, tile_keys);
      float slopes[lane_rows][wide];
      if (key < end_key) products_of_rows(at, gradients, values, slopes);
      warp.arrive();
      team.sync();  // the keys have arrived, and all are done with the values
      if (key + keys < tiles.end) tiles.fetch(team, of_v, key + keys, values);
      if (key >= end_key) continue;
      float scores[lane_rows][wide];
      products_of_rows(at, queries, tile_keys, scores);
      make_slopes_of_lanes(
          warp, factors, scores, slopes, [&](int i, int) { return of_rows[i]; }, sees.all(key, keys),
          [&](int i, int j) {
            const int its = key + at.column_of(j);
            return its >= sees.first(i) && its < sees.end(i);
          });
      leave_weights(at, slopes, weights);
      warp.meet();
      add_product_of_lanes(at, weights, tile_keys, sums);
    }
    warp.arrive();  // needed if there was no key
    store_lane_sums<width>(s, at, sums, static_cast<float>(s.scale), of.rows, dq, of.first_row, of.column);
  }
};

// dk and dv: a block for each tile of keys of a key/value head, over the query heads that read it and the
// queries that may see the keys, 8 `wide` at a time.
template <int width, int wide>
struct LaneAttentionBackwardKeys {
  static constexpr int queries = 8 * wide;
  AttentionSizes s;  // its tile is of keys
  Matrix<float> q, k, v, dout, dk, dv;
  const float *lse, *delta;

  int heads_together() const { return key_heads_together<float>(s); }
  ECHELON_HOST_DEVICE static constexpr int tile_of(std::int64_t lanes) {
    return LanePlace::rows_of_block(lanes);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return LaneRows<width>::bytes_for(2 * tile_of(lanes) + 2 * queries) +
           LaneRows<queries>::bytes_for(tile_of(lanes)) + sizeof(OfQueries<queries>);
  }
  std::int64_t num_blocks() const { return s.batch * s.num_kv_heads * s.tiles_of(s.kv_len); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    using Rows = LaneRows<width>;
    const auto warp = team.warp();
    const KeyTile of(s, team.block());
    const LanePlace at(warp);
    const int tile = tile_of(team.lanes());
    const Rows tile_keys{reinterpret_cast<float*>(team.shared())},
        values = tile_keys.template behind<Rows>(tile), tile_queries = values.template behind<Rows>(tile),
        gradients = tile_queries.template behind<Rows>(queries);
    const auto weights = gradients.template behind<LaneRows<queries>>(queries);
    auto& those = *reinterpret_cast<OfQueries<queries>*>(weights.at(tile, 0));

    const auto fetch_mine = [&](const Matrix<float>& from, const Rows& to) {
      HeadColumns<width, Rows>(team, from, of.kv_column, s.head_dim)
          .fetch(team, of.first_row, of.rows, to, tile);
    };
    fetch_mine(k, tile_keys);
    fetch_mine(v, values);
    const HeadColumns<width, Rows> of_q(team, q, 0, s.head_dim), of_dout(team, dout, 0, s.head_dim);

    const QueryTiles<queries> tiles(s, of);
    const ScoreFactors factors(s);
    QueryNotes<queries> notes;
    auto next = tiles.first(team);
    if (tiles.has(next)) {
      tiles.fetch(team, of_q, next, tile_queries);
      notes.take(team, s, lse, delta, of.sequence, next);
      notes.leave(team, those);
    }
    float key_sums[lane_rows][width / 8] = {}, value_sums[lane_rows][width / 8] = {};
    while (tiles.has(next)) {
      const auto now = next;
      const bool mine = of.key + at.first_row < now.end_key;
      warp.arrive();
      team.sync();  // the queries have arrived, and all are done with the last gradients
      tiles.fetch(team, of_dout, now, gradients);
      next = tiles.behind(team, now);
      if (tiles.has(next)) notes.take(team, s, lse, delta, of.sequence, next);
      float scores[lane_rows][wide];
      if (mine) products_of_rows(at, tile_keys, tile_queries, scores);
      warp.arrive();
      team.sync();  // the gradients have arrived
      if (mine) {
        float slopes[lane_rows][wide];
        products_of_rows(at, values, gradients, slopes);
        const int first_key = of.key + at.first_row, end_key = of.key + at.end_row;  // of the warp
        make_slopes_of_lanes(
            warp, factors, scores, slopes,
            [&](int, int j) {
              const int query = at.column_of(j);
              return those.pairs[query / 2].of[query % 2];
            },
            now.rows == queries && now.latest_first <= first_key && end_key <= end_key_of(s, now.query),
            [&](int i, int j) {
              const int query = at.column_of(j), its = of.key + at.row_of(i);
              return its >= those.first[query] && its < those.end[query];
            });
        leave_weights(at, slopes, weights);
        warp.meet();
        add_product_of_lanes(at, weights, tile_queries, key_sums);
        warp.meet();
        leave_weights(at, scores, weights);
        warp.meet();
      }
      team.sync();  // all are done with the queries
      if (tiles.has(next)) {
        tiles.fetch(team, of_q, next, tile_queries);
        notes.leave(team, those);
      }
      if (mine) add_product_of_lanes(at, weights, gradients, value_sums);
    }
    warp.arrive();  // needed if there was no query
    store_lane_sums<width>(s, at, key_sums, static_cast<float>(s.scale), of.rows, dk, of.first_row,
                           of.kv_column);
    store_lane_sums<width>(s, at, value_sums, 1.0f, of.rows, dv, of.first_row, of.kv_column);
  }
};

}  // namespace echelon::rows
