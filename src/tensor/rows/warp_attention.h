// Causal attention of bf16 on tensor cores (FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691):
// each warp of a block has queries of its own, whose scores, softmax and sums stay in its registers. What
// Kernels::attention says holds. Sums, softmaxes and what is stored of them are f32; the weights that
// multiply values are rounded to bf16. A block writes what no other does: the same call has the same bits.
#pragma once

#include <cmath>

#include "tensor/rows/fragments.h"
#include "tensor/rows/tiled_attention.h"

namespace echelon::rows {

// Exponentials are powers of two, whose exponents are scores times log2 of e.
inline constexpr float log2_of_e = 1.44269504088896340736f;

struct Smaller {
  template <class X>
  ECHELON_HOST_DEVICE X operator()(X a, X b) const {
    return b < a ? b : a;
  }
};

// A head's elements in shared memory: up to a multiple of 16, with zeros behind them.
ECHELON_HOST_DEVICE constexpr int padded_head(int head_dim) { return (head_dim + 15) / 16 * 16; }
// `rows` rows of heads.
inline std::size_t warp_attention_bytes(int rows, int head_dim) {
  return sizeof(bf16) * static_cast<std::size_t>(rows * SharedRows::stride_of(padded_head(head_dim)));
}

// Which queries and keys of which head are a block's. Those that may see most keys come first: what is left
// to the end is small.
struct QueryTile {
  std::int64_t sequence, head, query;
  int rows;  // that there are
  std::int64_t first_row, column, kv_column;
  // Of all heads the last queries first: they see the most keys, and what is short fills the device at the
  // end.
  ECHELON_HOST_DEVICE QueryTile(const AttentionSizes& s, std::int64_t block) {
    const std::int64_t heads = s.batch * s.num_heads;
    sequence = block % heads / s.num_heads;
    head = block % heads % s.num_heads;
    query = (s.tiles_of(s.q_len) - 1 - block / heads) * s.tile;
    rows = static_cast<int>(s.q_len - query < s.tile ? s.q_len - query : s.tile);
    first_row = sequence * s.q_len + query;
    column = head * s.head_dim;
    kv_column = head / (s.num_heads / s.num_kv_heads) * s.head_dim;
  }
};

// Of queries [query, query + rows): the first key that one of them sees. Every lane gets it.
template <class Team>
ECHELON_HOST_DEVICE int first_key_of(const Team& team, const AttentionSizes& s, std::int64_t sequence,
                                     std::int64_t query, int rows) {
  if (s.first_keys == nullptr) return 0;
  int first = static_cast<int>(s.kv_len);
  for (int i = static_cast<int>(team.lane()); i < rows; i += static_cast<int>(team.lanes()))
    first = Smaller()(first, static_cast<int>(s.first_key(sequence, query + i)));
  return team.reduce(first, Smaller());
}

// Tiles of `size` keys of a head, of which one of a tile of queries may see some.
struct KeyTiles {
  const AttentionSizes& s;
  const QueryTile& queries;
  int size, begin, end;  // begin: a multiple of size
  template <class Team>
  ECHELON_HOST_DEVICE KeyTiles(const Team& team, const AttentionSizes& of, const QueryTile& at, int size_of)
      : s(of),
        queries(at),
        size(size_of),
        begin(first_key_of(team, of, at.sequence, at.query, at.rows) / size_of * size_of),
        end(static_cast<int>(of.end_key(at.query + at.rows - 1))) {}
  // Of keys or values, those from `key` on.
  template <class Team>
  ECHELON_HOST_DEVICE void fetch(const Team& team, const Matrix<bf16>& from, int key, int head_dim,
                                 const SharedRows& to) const {
    fetch_rows(team, from, queries.sequence * s.kv_batch_stride + key, queries.kv_column,
               end - key < size ? end - key : size, head_dim, to, size, padded_head(head_dim));
  }
};

// The keys that the queries of a lane's sums see; none where there is no query.
template <int strips>
struct SeenKeys {
  int first[strips][2], end[strips][2];

  template <class Warp>
  ECHELON_HOST_DEVICE SeenKeys(const Warp& warp, const AttentionSizes& s, const QueryTile& at, int row) {
    each_row_of_sums<strips>([&](int i, int half) {
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      const bool is = mine < at.rows;
      first[i][half] = is ? static_cast<int>(s.first_key(at.sequence, at.query + mine)) : 0;
      end[i][half] = is ? static_cast<int>(s.end_key(at.query + mine)) : 0;
    });
  }
  ECHELON_HOST_DEVICE bool has(int i, int half, int key) const {
    return key >= first[i][half] && key < end[i][half];
  }
  // Whether they all see all of keys [key, key + wide).
  ECHELON_HOST_DEVICE bool all(int key, int wide) const {
    bool so = true;
    each_row_of_sums<strips>(
        [&](int i, int half) { so = so && first[i][half] <= key && key + wide <= end[i][half]; });
    return so;
  }
};

// What makes scores, in units of log2, of products of queries and keys: `factor` times the product where
// there is no cap, else `cap` times the hyperbolic tangent of `inner` times the product.
struct ScoreFactors {
  bool capped;
  float factor, inner, cap;
  ECHELON_HOST_DEVICE explicit ScoreFactors(const AttentionSizes& s)
      : capped(s.cap > 0),
        factor(static_cast<float>(s.scale) * log2_of_e),
        inner(capped ? static_cast<float>(s.scale / s.cap) : 0.0f),
        cap(static_cast<float>(s.cap) * log2_of_e) {}
};
// By the exponential that devices have, to a few units of the last place of 1.
template <class Warp>
ECHELON_HOST_DEVICE float tanh_of(const Warp& warp, float x) {
  return 1 - 2 * warp.reciprocal(1 + warp.power_of_two(x * (2 * log2_of_e)));
}

// A block for each tile of queries of a head: `strips` times 16 of them to a warp, against `keys` at a time.
// `columns`: for heads up to so wide; `whole`: for those that are just so wide.
template <int columns, bool whole, int strips, int keys>
struct WarpAttention {
  AttentionSizes s;
  Matrix<bf16> q, k, v, out;
  float* lse;

  // Of a device's multiprocessor, at least: four short rows of narrow heads hide each other's waits.
  static constexpr int blocks_at_once = columns == 64 && strips == 1 ? 4 : 1;
  static int queries(std::int64_t lanes) { return static_cast<int>(lanes) / warp_lanes * 16 * strips; }
  static std::size_t shared_bytes(std::int64_t lanes, int head_dim) {
    return warp_attention_bytes(queries(lanes) + 2 * keys, head_dim);
  }
  std::int64_t num_blocks() const { return s.batch * s.num_heads * s.tiles_of(s.q_len); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = team.warp();
    const QueryTile at(s, team.block());
    const int head_dim = whole ? columns : s.head_dim, depth = padded_head(head_dim);
    const int stride = SharedRows::stride_of(depth), row = warp.number() * 16 * strips;
    const SharedRows queries{reinterpret_cast<bf16*>(team.shared()), stride};
    const SharedRows tile_keys{queries.at(s.tile, 0), stride}, values{tile_keys.at(keys, 0), stride};

    const KeyTiles tiles(team, s, at, keys);
    fetch_rows(team, q, at.first_row, at.column, at.rows, head_dim, queries, s.tile, depth);
    if (tiles.begin < tiles.end) tiles.fetch(team, k, tiles.begin, head_dim, tile_keys);

    const SeenKeys<strips> seen(warp, s, at, row);
    const ScoreFactors factors(s);
    // The last of a warp's queries sees keys below this.
    const int rows_end = at.rows < row + 16 * strips ? at.rows : row + 16 * strips;
    const int warp_end = rows_end > row ? static_cast<int>(s.end_key(at.query + rows_end - 1)) : 0;
    SumFragment sums[strips][columns / 8];
    float max[strips][2], total[strips][2];  // in units of log2; of this lane's columns
    begin(warp, at, row, sums, max, total);

    for (int key = tiles.begin; key < tiles.end; key += keys) {
      warp.arrive();
      team.sync();  // the keys are there, and all are done with the last values
      tiles.fetch(team, v, key, head_dim, values);
      SumFragment scores[strips][keys / 8] = {};
      if (key < warp_end) add_product_of_turned<strips, keys>(warp, queries, row, tile_keys, depth, scores);
      warp.arrive();
      team.sync();  // the values are there, and all are done with the keys
      if (key + keys < tiles.end) tiles.fetch(team, k, key + keys, head_dim, tile_keys);
      if (key >= warp_end) continue;
      const float factor = begin_scores(warp, factors, scores);
      add_softmax(warp, seen, key, factor, scores, sums, max, total);
      add_product_of_weights<strips, keys, columns>(warp, scores, values, 0, depth, sums);
    }
    warp.arrive();  // where there was no key
    end(warp, at, row, head_dim, sums, max, total);
  }

 private:
  static constexpr float none = -static_cast<float>(INFINITY);

  // What earlier calls found is one more key, whose score is their lse and whose value is their out.
  template <class Warp>
  ECHELON_HOST_DEVICE void begin(const Warp& warp, const QueryTile& at, int row,
                                 SumFragment (&sums)[strips][columns / 8], float (&max)[strips][2],
                                 float (&total)[strips][2]) const {
    each_row_of_sums<strips>([&](int i, int half) {
      max[i][half] = none;
      total[i][half] = 0;
      each_sum_of_row<columns / 8>(half, [&](int j, int e) { sums[i][j].sums[e] = 0; });
    });
    if (!s.accumulate) return;
    each_row_of_sums<strips>([&](int i, int half) {
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      const float earlier = mine < at.rows ? lse[s.softmax(at.sequence, at.head, at.query + mine)] : none;
      const bool begun = std::isfinite(earlier);
      max[i][half] = begun ? earlier * log2_of_e : none;
      total[i][half] = begun && warp.lane() % 4 == 0 ? 1.0f : 0.0f;  // one of the four who add it up
      each_sum_of_row<columns / 8>(half, [&](int j, int e) {
        const int d = 8 * j + fragment_column(warp.lane(), e);
        sums[i][j].sums[e] = begun && d < s.head_dim ? float{out[at.first_row + mine][at.column + d]} : 0.0f;
      });
    });
  }

  // Of products, scores but for a factor above 0, which it gives.
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

  // Scores, `score` times what they are given as, become exponentials relative to the largest score up to
  // now, and the sums so far too.
  template <class Warp>
  ECHELON_HOST_DEVICE void add_softmax(const Warp& warp, const SeenKeys<strips>& seen, int key, float score,
                                       SumFragment (&scores)[strips][keys / 8],
                                       SumFragment (&sums)[strips][columns / 8], float (&max)[strips][2],
                                       float (&total)[strips][2]) const {
    if (!seen.all(key, keys))
      each_sum<strips, keys / 8>([&](int i, int j, int e) {
        if (!seen.has(i, e / 2, key + 8 * j + fragment_column(warp.lane(), e))) scores[i][j].sums[e] = none;
      });
    each_row_of_sums<strips>([&](int i, int half) {
      float most = none;
      each_sum_of_row<keys / 8>(half, [&](int j, int e) { most = std::fmax(most, scores[i][j].sums[e]); });
      most = std::fmax(most, warp.across(most, 1));
      most = std::fmax(most, warp.across(most, 2));
      most = std::fmax(max[i][half], most == none ? none : most * score);
      const float base = most == none ? 0.0f : most, factor = warp.power_of_two(max[i][half] - base);
      float of_tile = 0;
      each_sum_of_row<keys / 8>(half, [&](int j, int e) {
        float& x = scores[i][j].sums[e];
        x = warp.power_of_two(std::fma(x, score, -base));
        of_tile += x;
      });
      max[i][half] = most;
      total[i][half] = total[i][half] * factor + of_tile;
      each_sum_of_row<columns / 8>(half, [&](int j, int e) { sums[i][j].sums[e] *= factor; });
    });
  }

  template <class Warp>
  ECHELON_HOST_DEVICE void end(const Warp& warp, const QueryTile& at, int row, int head_dim,
                               const SumFragment (&sums)[strips][columns / 8], const float (&max)[strips][2],
                               const float (&total)[strips][2]) const {
    each_row_of_sums<strips>([&](int i, int half) {
      float all = total[i][half];
      all += warp.across(all, 1);
      all += warp.across(all, 2);
      const int mine = row + 16 * i + fragment_row(warp.lane(), 2 * half);
      if (mine >= at.rows) return;
      if (warp.lane() % 4 == 0)  // no key: -infinity
        lse[s.softmax(at.sequence, at.head, at.query + mine)] =
            (max[i][half] + std::log2(all)) * (1 / log2_of_e);
      const float part = all == 0 ? 0.0f : 1 / all;
      each_pair_of_row<columns / 8>(half, head_dim, warp.lane(), [&](int j, int e, int d) {
        const float* const two = sums[i][j].sums + e;
        store_pair(warp, two[0] * part, two[1] * part, out[at.first_row + mine] + at.column + d);
      });
    });
  }
};

}  // namespace echelon::rows
