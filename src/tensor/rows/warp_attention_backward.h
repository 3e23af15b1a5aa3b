// The gradients of attention of bf16 on tensor cores, in two passes as AttentionSlopes says: one for what
// queries get, one for what keys get, each of which makes the scores again, so that every sum is one warp's
// and none needs an atomic. Sums are f32; softmaxes and the gradients of scores are rounded to bf16 for the
// products that they go into.
#pragma once

#include "tensor/rows/warp_attention.h"

namespace echelon::rows {

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

// dq, a block for each tile of queries of a head: `strips` times 16 queries to a warp, against `keys` at a
// time.
template <int width, int strips, int keys, bool warpgroup>
struct WarpAttentionBackwardQueries {
  AttentionSizes s;
  Matrix<bf16> q, k, v, dout, dq;
  const float *lse, *delta;

  static constexpr int blocks_at_once = width == 64 && warpgroup ? 4 : 1;
  int heads_together() const { return query_heads_together(s); }
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

    const KeyTiles<width, keys> tiles(team, s, at);
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
      team.sync();  // the values are there, and all are done with the last keys
      tiles.fetch(team, of_k, key, tile_keys);
      SumFragment slopes[strips][keys / 8];
      if (key < end_key) {
        begin_products(warp);
        product_of_turned<strips, keys, width>(warp, gradients, row, values, slopes);
        end_products(warp, slopes);
      }
      warp.arrive();
      team.sync();  // the keys are there, and all are done with the values
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
    warp.arrive();  // where there was no key
    store_sums<strips, width>(warp, s, sums, static_cast<float>(s.scale), row, at.rows, s.head_dim, dq,
                              at.first_row, at.column);
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

// dk and dv, a block for each tile of keys of a key/value head, `strips` times 16 keys to a warp: over the
// query heads that read it, and over the queries that may see the keys, `queries` at a time. Of a head wider
// than `columns` several blocks have so many each, and each of them makes all of the scores.
// While one tile of queries is worked on, the next is on its way.
template <int width, int columns, int strips, int queries, bool warpgroup>
struct WarpAttentionBackwardKeys {
  static_assert(width % columns == 0);
  AttentionSizes s;  // whose tile is of keys
  Matrix<bf16> q, k, v, dout, dk, dv;
  const float *lse, *delta;

  static constexpr int blocks_at_once = width == 64 && warpgroup ? 3 : 1;
  int heads_together() const {
    return rows::heads_together(s.batch * s.num_kv_heads, s.q_len * s.num_heads / s.num_kv_heads, s.head_dim);
  }
  ECHELON_HOST_DEVICE static constexpr int tile_of(std::int64_t lanes) {
    return rows_of_block(lanes, strips);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return SharedRoom::bytes_for(2 * tile_of(lanes) + 4 * queries, width) + 2 * sizeof(OfQueries);
  }
  std::int64_t num_blocks() const { return s.batch * s.num_kv_heads * s.tiles_of(s.kv_len) * parts(); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = warp_of<warpgroup>(team);
    const int column = static_cast<int>(team.block() % parts()) * columns;
    // Of a head the first keys first, which the most queries see.
    const TileOfHead place(team.block() / parts(), s.batch, s.num_kv_heads, s.tiles_of(s.kv_len),
                           s.heads_together);
    const int sequence = place.sequence, kv_head = place.head, key = place.tile * s.tile;
    const int rows = Smaller()(static_cast<int>(s.kv_len) - key, s.tile);
    const int row = warp.number() * 16 * strips, tile = tile_of(team.lanes());
    const std::int64_t first_row = sequence * s.kv_batch_stride + key,
                       kv_column = static_cast<std::int64_t>(kv_head) * s.head_dim;
    SharedRoom room(team.shared());
    const SharedRows tile_keys = room.take(tile, width), values = room.take(tile, width);
    // Of queries and of their gradients two tiles each, of which one is worked on.
    const SharedRows two_queries = room.take(queries, width);
    room.take(queries, width);
    const SharedRows two_gradients = room.take(queries, width);
    room.take(queries, width);
    const auto one = [](const SharedRows& two, int stage) {
      return SharedRows{two.data + stage * SharedRows::elements(queries, width), queries};
    };
    OfQueries* const of_queries = static_cast<OfQueries*>(room.rest());
    HeadColumns<width>(team, k, kv_column, s.head_dim).fetch(team, first_row, rows, tile_keys, tile);
    HeadColumns<width>(team, v, kv_column, s.head_dim).fetch(team, first_row, rows, values, tile);
    const HeadColumns<width> of_q(team, q, 0, s.head_dim), of_dout(team, dout, 0, s.head_dim);
    const auto fetch = [&](const Place& at, int stage) {
      const std::int64_t from = sequence * s.q_len + at.query,
                         to_head = static_cast<std::int64_t>(at.head) * s.head_dim;
      of_q.fetch(team, from, at.rows, one(two_queries, stage), queries, to_head);
      of_dout.fetch(team, from, at.rows, one(two_gradients, stage), queries, to_head);
    };

    const auto heads = static_cast<int>(s.num_heads / s.num_kv_heads);
    const Bounds bounds{key < s.q_offset ? 0 : static_cast<int>((key - s.q_offset) / queries * queries),
                        (kv_head + 1) * heads, key, key + rows};
    const ScoreFactors factors(s);
    Notes notes;
    Place at = seek(team, bounds, sequence, kv_head * heads, bounds.first_query);
    if (at.head < bounds.end_head) {
      fetch(at, 0);
      notes.take(team, *this, sequence, at);
      notes.leave(team, of_queries[0]);
    }
    const RowsTogether together = rows_together<strips>(warp);
    SumFragment key_sums[strips][columns / 8] = {}, value_sums[strips][columns / 8] = {};
    for (int stage = 0; at.head < bounds.end_head; stage = 1 - stage) {
      warp.arrive();
      team.sync();  // the queries are there, and all are done with the last
      const Place next = seek(team, bounds, sequence, at.head, at.query + queries);
      if (next.head < bounds.end_head) {
        fetch(next, 1 - stage);
        notes.take(team, *this, sequence, next);
      }
      if (key + together.begin < at.end_key) {
        const int first_key = key + row, end_key = first_key + 16 * strips;  // of the warp
        const SharedRows tile_queries = one(two_queries, stage), gradients = one(two_gradients, stage);
        const OfQueries& of = of_queries[stage];
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
      if (next.head < bounds.end_head) notes.leave(team, of_queries[1 - stage]);
      at = next;
    }
    warp.arrive();  // where there was no query
    store_sums<strips, columns>(warp, s, key_sums, static_cast<float>(s.scale), row, rows,
                                s.head_dim - column, dk, first_row, kv_column + column);
    store_sums<strips, columns>(warp, s, value_sums, 1.0f, row, rows, s.head_dim - column, dv, first_row,
                                kv_column + column);
  }

 private:
  // Blocks that share a head.
  ECHELON_HOST_DEVICE int parts() const {
    return width == columns ? 1 : (s.head_dim + columns - 1) / columns;
  }
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
        const int rows = Smaller()(q_len - query, queries), end_key = end_key_of(s, query + rows - 1);
        if (end_key <= bounds.key) continue;
        const FirstKeys first = first_keys_of(team, s, sequence, query, rows);
        if (first.earliest < bounds.end_key) return {head, query, rows, first.latest, end_key};
      }
    return {head, 0, 0, 0, 0};
  }

  // What a lane brings of a tile's queries: read early, and left in shared memory when it is there.
  class Notes {
   public:
    template <class Team>
    ECHELON_HOST_DEVICE void take(const Team& team, const WarpAttentionBackwardKeys& of, int sequence,
                                  const Place& at) {
      each(team, [&](Note& note, int i) {
        const std::int64_t softmax = of.s.softmax(sequence, at.head, at.query + i);
        const bool is = i < at.rows;
        note = {is ? of.lse[softmax] : 0.0f, is ? of.delta[softmax] : 0.0f,
                is ? static_cast<int>(of.s.first_key(sequence, at.query + i)) : 0,
                is ? end_key_of(of.s, at.query + i) : 0};
      });
    }
    template <class Team>
    ECHELON_HOST_DEVICE void leave(const Team& team, OfQueries& of) {
      each(team, [&](const Note& note, int i) {
        of.pairs[i / 2].of[i % 2] = {note.lse * log2_of_e, note.delta};
        of.first[i] = note.first;
        of.end[i] = note.end;
      });
    }

   private:
    struct Note {
      float lse, delta;
      int first, end;
    };
    template <class Team, class Body>
    ECHELON_HOST_DEVICE void each(const Team& team, const Body& body) {
      int i = static_cast<int>(team.lane());
      ECHELON_UNROLL
      for (int n = 0; n < most; ++n, i += static_cast<int>(team.lanes()))
        if (i < queries) body(notes_[n], i);
    }
    static constexpr int most = queries / warp_lanes;  // where a block is one warp
    Note notes_[most] = {};
  };
};

}  // namespace echelon::rows
