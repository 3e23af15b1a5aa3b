// Causal attention in bf16 on tensor cores (FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691):
// each warp of a block has its own queries, whose scores, softmax and sums stay in its registers. Implements
// Kernels::attention. Sums, softmaxes and what is stored of them are f32; the weights that multiply values
// are rounded to bf16. Each output is written by one block, so the same call has the same bits.
#pragma once

#include <cmath>

#include "tensor/rows/attention_tiles.h"
#include "tensor/rows/fragments.h"

namespace echelon::rows {

// The keys that the queries of a lane's sums see; none for missing queries.
template <int strips>
struct SeenKeys {
  int first[strips][2], end[strips][2];

  template <class Warp>
  ECHELON_HOST_DEVICE SeenKeys(const Warp& warp, const AttentionSizes& s, const QueryTile& at, int row) {
    each_row_of_sums<strips>([&](int i, int half) {
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      const bool is = mine < at.rows;
      first[i][half] = is ? static_cast<int>(s.first_key(at.sequence, at.query + mine)) : 0;
      end[i][half] = is ? end_key_of(s, at.query + mine) : 0;
    });
  }
  ECHELON_HOST_DEVICE bool has(int i, int half, int key) const {
    return key >= first[i][half] && key < end[i][half];
  }
  // Whether all of them see all of keys [key, key + wide).
  ECHELON_HOST_DEVICE bool all(int key, int wide) const {
    bool so = true;
    each_row_of_sums<strips>(
        [&](int i, int half) { so = so && first[i][half] <= key && key + wide <= end[i][half]; });
    return so;
  }
};

// The end of the keys that the last of the queries that are multiplied together sees.
template <int strips, class Warp>
ECHELON_HOST_DEVICE int end_key_together(const Warp& warp, const AttentionSizes& s, const QueryTile& at) {
  const RowsTogether rows = rows_together<strips>(warp);
  const int end = Smaller()(at.rows, rows.end);
  return end > rows.begin ? end_key_of(s, at.query + end - 1) : 0;
}

// By the device's exponential, with an error of a few units in the last place of 1.
template <class Warp>
ECHELON_HOST_DEVICE float tanh_of(const Warp& warp, float x) {
  return 1 - 2 * warp.reciprocal(1 + warp.power_of_two(x * (2 * log2_of_e)));
}

// A block for each tile of queries of a head: `strips` times 16 queries per warp, against `keys` keys at a
// time. `width`: the widest heads; columns beyond a head are zeros. `warpgroup`: the block is a warpgroup,
// and multiplies together if the device can.
template <int width, int strips, int keys, bool warpgroup>
struct WarpAttention {
  AttentionSizes s;
  Matrix<bf16> q, k, v, out;
  float* lse;

  // The least number of blocks on a multiprocessor: four with short rows and narrow heads hide each other's
  // waits.
  static constexpr int blocks_at_once = width == 64 && strips == 1 ? 4 : width == 128 && warpgroup ? 3 : 1;
  int heads_together() const { return query_heads_together<bf16>(s); }
  ECHELON_HOST_DEVICE static constexpr int tile_of(std::int64_t lanes) {
    return rows_of_block(lanes, strips);
  }
  static std::size_t shared_bytes(std::int64_t lanes) {
    return SharedRoom::bytes_for(tile_of(lanes) + 2 * keys, width);
  }
  std::int64_t num_blocks() const { return s.batch * s.num_heads * s.tiles_of(s.q_len); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = warp_of<warpgroup>(team);
    const QueryTile at(s, team.block());
    const int row = warp.number() * 16 * strips, tile = tile_of(team.lanes());
    SharedRoom room(team.shared());
    const SharedRows queries = room.take(tile, width), tile_keys = room.take(keys, width),
                     values = room.take(keys, width);

    const KeyTiles<keys, SharedRows> tiles(team, s, at);
    const HeadColumns<width> of_k(team, k, at.kv_column, s.head_dim), of_v(team, v, at.kv_column, s.head_dim);
    HeadColumns<width>(team, q, at.column, s.head_dim).fetch(team, at.first_row, at.rows, queries, tile);
    if (tiles.begin < tiles.end) tiles.fetch(team, of_k, tiles.begin, tile_keys);

    const SeenKeys<strips> seen(warp, s, at, row);
    const ScoreFactors factors(s);
    const int end_key = end_key_together<strips>(warp, s, at);
    SumFragment sums[strips][width / 8];
    float max[strips][2], total[strips][2];  // max in units of log2; total of this lane's columns
    begin(warp, at, row, sums, max, total);

    for (int key = tiles.begin; key < tiles.end; key += keys) {
      warp.arrive();
      team.sync();  // the keys have arrived, and all are done with the last values
      tiles.fetch(team, of_v, key, values);
      SumFragment scores[strips][keys / 8];
      if (key < end_key) {
        begin_products(warp);
        product_of_turned<strips, keys, width>(warp, queries, row, tile_keys, scores);
        end_products(warp, scores);
      }
      warp.arrive();
      team.sync();  // the values have arrived, and all are done with the keys
      if (key + keys < tiles.end) tiles.fetch(team, of_k, key + keys, tile_keys);
      if (key >= end_key) continue;
      const float factor = begin_scores(warp, factors, scores);
      add_softmax(warp, seen, key, factor, scores, sums, max, total);
      Weights<strips, keys> weights(warp, scores);
      begin_products(warp, weights.all, sums);
      add_product_of_weights<strips, keys, width>(warp, weights, values, 0, sums);
      end_products(warp, sums);
    }
    warp.arrive();  // needed if there was no key
    end(warp, at, row, sums, max, total);
  }

 private:
  static constexpr float none = -static_cast<float>(INFINITY);

  // The result of earlier calls counts as one more key, with their lse as its score and their out as its
  // value.
  template <class Warp>
  ECHELON_HOST_DEVICE void begin(const Warp& warp, const QueryTile& at, int row,
                                 SumFragment (&sums)[strips][width / 8], float (&max)[strips][2],
                                 float (&total)[strips][2]) const {
    each_row_of_sums<strips>([&](int i, int half) {
      max[i][half] = none;
      total[i][half] = 0;
      each_sum_of_row<width / 8>(half, [&](int j, int e) { sums[i][j].sums[e] = 0; });
    });
    if (!s.accumulate) return;
    each_row_of_sums<strips>([&](int i, int half) {
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      const float earlier = mine < at.rows ? lse[s.softmax(at.sequence, at.head, at.query + mine)] : none;
      const bool begun = earlier != none;
      max[i][half] = begun ? earlier * log2_of_e : none;
      total[i][half] = begun && warp.lane() % 4 == 0 ? 1.0f : 0.0f;  // one of the four lanes that add it up
      each_sum_of_row<width / 8>(half, [&](int j, int e) {
        const int d = 8 * j + fragment_column(warp.lane(), e);
        sums[i][j].sums[e] = begun && d < s.head_dim ? float{out[at.first_row + mine][at.column + d]} : 0.0f;
      });
    });
  }

  // Turns products into scores, except for a positive factor, which it returns.
  template <class Warp>
  ECHELON_HOST_DEVICE float begin_scores(const Warp& warp, const ScoreFactors& factors,
                                         SumFragment (&products)[strips][keys / 8]) const {
    if (factors.capped) {
      each_sum<strips, keys / 8>([&](int i, int j, int e) {
        float& x = products[i][j].sums[e];
        x = factors.cap * tanh_of(warp, x * factors.inner);
      });
      return 1;
    }
    if (factors.factor > 0) return factors.factor;
    each_sum<strips, keys / 8>([&](int i, int j, int e) { products[i][j].sums[e] *= factors.factor; });
    return 1;
  }

  // Turns scores, which are `score` times the given numbers, into exponentials relative to the largest score
  // so far, and rescales the sums so far.
  template <class Warp>
  ECHELON_HOST_DEVICE void add_softmax(const Warp& warp, const SeenKeys<strips>& seen, int key, float score,
                                       SumFragment (&scores)[strips][keys / 8],
                                       SumFragment (&sums)[strips][width / 8], float (&max)[strips][2],
                                       float (&total)[strips][2]) const {
    if (!seen.all(key, keys))
      each_sum<strips, keys / 8>([&](int i, int j, int e) {
        if (!seen.has(i, e / 2, key + 8 * j + fragment_column(warp.lane(), e))) scores[i][j].sums[e] = none;
      });
    each_row_of_sums<strips>([&](int i, int half) {
      // Two independent chains of each, which do not wait for each other.
      float most_of[2] = {none, none};
      each_sum_of_row<keys / 8>(
          half, [&](int j, int e) { most_of[e % 2] = std::fmax(most_of[e % 2], scores[i][j].sums[e]); });
      float most = std::fmax(most_of[0], most_of[1]);
      most = std::fmax(most, warp.across(most, 1));
      most = std::fmax(most, warp.across(most, 2));
      most = std::fmax(max[i][half], most == none ? none : most * score);
      const float base = most == none ? 0.0f : most, factor = warp.power_of_two(max[i][half] - base);
      float of_tile[2] = {0, 0};
      each_sum_of_row<keys / 8>(half, [&](int j, int e) {
        float& x = scores[i][j].sums[e];
        x = warp.power_of_two(std::fma(x, score, -base));
        of_tile[e % 2] += x;
      });
      max[i][half] = most;
      total[i][half] = total[i][half] * factor + (of_tile[0] + of_tile[1]);
      each_sum_of_row<width / 8>(half, [&](int j, int e) { sums[i][j].sums[e] *= factor; });
    });
  }

  template <class Warp>
  ECHELON_HOST_DEVICE void end(const Warp& warp, const QueryTile& at, int row,
                               const SumFragment (&sums)[strips][width / 8], const float (&max)[strips][2],
                               const float (&total)[strips][2]) const {
    each_row_of_sums<strips>([&](int i, int half) {
      float all = total[i][half];
      all += warp.across(all, 1);
      all += warp.across(all, 2);
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      if (mine >= at.rows) return;
      if (warp.lane() % 4 == 0)  // without keys: -infinity
        lse[s.softmax(at.sequence, at.head, at.query + mine)] =
            (max[i][half] + std::log2(all)) * (1 / log2_of_e);
      const float part = all == 0 ? 0.0f : 1 / all;
      each_pair_of_row<width / 8>(half, s.head_dim, warp.lane(), [&](int j, int e, int d) {
        const float* const two = sums[i][j].sums + e;
        store_pair(warp, two[0] * part, two[1] * part, out[at.first_row + mine] + at.column + d);
      });
    });
  }
};

}  // namespace echelon::rows
