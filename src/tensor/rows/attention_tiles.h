// Assigns tiles of causal attention to blocks, and finds the tiles of the other side that each block meets.
// For kernels that keep scores in registers: on tensor cores (warp_attention.h), and in f32 on ordinary cores
// (lane_attention.h). Queries and keys are neighbours: steps are 1.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "tensor/rows/fragments.h"
#include "tensor/rows/tiled_attention.h"

namespace echelon::rows {

// Exponentials are computed as powers of two, of scores times log2(e).
inline constexpr float log2_of_e = 1.44269504088896340736f;

struct Smaller {
  template <class X>
  ECHELON_HOST_DEVICE X operator()(X a, X b) const {
    return b < a ? b : a;
  }
};

// AttentionSizes::end_key for neighbouring queries and keys.
ECHELON_HOST_DEVICE inline int end_key_of(const AttentionSizes& s, int query) {
  const int end = static_cast<int>(s.q_offset) + query + 1, keys = static_cast<int>(s.kv_len);
  return end < 0 ? 0 : Smaller()(end, keys);
}

// The tile, and the sequence and head, that a block computes. Heads are processed in groups, sized so that
// what many blocks read (two matrices of so many rows for each head) stays in the second-level cache; within
// a group, the first tiles of all heads come first.
struct TileOfHead {
  int sequence, head, tile;
  ECHELON_HOST_DEVICE TileOfHead(std::int64_t block, std::int64_t batch, std::int64_t heads,
                                 std::int64_t tiles, int heads_together) {
    const std::int64_t first = block / (heads_together * tiles) * heads_together;
    const std::int64_t group = Smaller()(static_cast<std::int64_t>(heads_together), batch * heads - first);
    const std::int64_t in_group = block - first * tiles, which = first + in_group % group;
    sequence = static_cast<int>(which / heads);
    head = static_cast<int>(which % heads);
    tile = static_cast<int>(in_group / group);
  }
};
// How many of `all` heads are in a group, if `rows_read` rows of two matrices are read for each. Groups are
// even: a small one would leave a device partly idle at the end.
inline int heads_together(std::int64_t all, std::int64_t rows_read, std::int64_t bytes_of_row) {
  constexpr std::int64_t in_cache = 32 << 20;  // of at least 40 MB
  const std::int64_t bytes = 2 * rows_read * bytes_of_row;
  const std::int64_t groups = Larger()(std::int64_t{1}, (all * bytes + in_cache - 1) / in_cache);
  return static_cast<int>(Larger()(std::int64_t{1}, (all + groups - 1) / groups));
}

// The same for what blocks with tiles of queries read: keys and values, which several heads may share.
template <class T>
int query_heads_together(const AttentionSizes& s) {
  return heads_together(s.batch * s.num_heads, s.kv_len * s.num_kv_heads / s.num_heads,
                        s.head_dim * static_cast<std::int64_t>(sizeof(T)));
}
// And for what blocks with tiles of keys read: the queries, and their gradients, of the heads that share
// them.
template <class T>
int key_heads_together(const AttentionSizes& s) {
  return heads_together(s.batch * s.num_kv_heads, s.q_len * s.num_heads / s.num_kv_heads,
                        s.head_dim * static_cast<std::int64_t>(sizeof(T)));
}

// A block's queries. The last of a head come first, since they see the most keys; the shorter blocks then
// fill the device at the end.
struct QueryTile {
  int sequence, head, query, rows;  // rows: how many exist
  std::int64_t first_row, column, kv_column;
  ECHELON_HOST_DEVICE QueryTile(const AttentionSizes& s, std::int64_t block) {
    const std::int64_t tiles = s.tiles_of(s.q_len);
    const TileOfHead at(block, s.batch, s.num_heads, tiles, s.heads_together);
    sequence = at.sequence;
    head = at.head;
    query = static_cast<int>(tiles - 1 - at.tile) * s.tile;
    rows = Smaller()(static_cast<int>(s.q_len) - query, s.tile);
    first_row = sequence * s.q_len + query;
    column = static_cast<std::int64_t>(head) * s.head_dim;
    kv_column = head / (s.num_heads / s.num_kv_heads) * s.head_dim;
  }
};

// The first key that any of queries [query, query + rows) sees. Every lane gets it.
template <class Team>
ECHELON_HOST_DEVICE int first_key_of(const Team& team, const AttentionSizes& s, int sequence, int query,
                                     int rows) {
  if (s.first_keys == nullptr) return 0;
  int first = static_cast<int>(s.kv_len);
  for (int i = static_cast<int>(team.lane()); i < rows; i += static_cast<int>(team.lanes()))
    first = Smaller()(first, static_cast<int>(s.first_key(sequence, query + i)));
  return team.reduce(first, Smaller());
}

// The tiles of `size` keys of a head that some query of a tile may see.
template <int size, class Rows>
struct KeyTiles {
  int begin, end;  // begin: a multiple of size
  std::int64_t first_row;
  template <class Team>
  ECHELON_HOST_DEVICE KeyTiles(const Team& team, const AttentionSizes& s, const QueryTile& at)
      : begin(first_key_of(team, s, at.sequence, at.query, at.rows) / size * size),
        end(end_key_of(s, at.query + at.rows - 1)),
        first_row(at.sequence * s.kv_batch_stride) {}
  // Keys or values from `key` on.
  template <class Team, class Columns>
  ECHELON_HOST_DEVICE void fetch(const Team& team, const Columns& from, int key, const Rows& to) const {
    from.fetch(team, first_row + key, Smaller()(end - key, size), to, size);
  }
};

// Converts products of queries and keys to scores in units of log2: `factor` times the product without a cap,
// else `cap` times tanh(`inner` times the product).
struct ScoreFactors {
  bool capped;
  float factor, inner, cap;
  ECHELON_HOST_DEVICE explicit ScoreFactors(const AttentionSizes& s)
      : capped(s.cap > 0),
        factor(static_cast<float>(s.scale) * log2_of_e),
        inner(capped ? static_cast<float>(s.scale / s.cap) : 0.0f),
        cap(static_cast<float>(s.cap) * log2_of_e) {}
};
// A query's log-sum-exp, times log2_of_e, and its delta.
struct OfQuery {
  float lse, delta;
};

// The first visible keys of some queries: of the one that sees most, and of the one that sees fewest.
struct FirstKeys {
  int earliest, latest;
};
template <class Team>
ECHELON_HOST_DEVICE FirstKeys first_keys_of(const Team& team, const AttentionSizes& s, int sequence,
                                            int query, int rows) {
  if (s.first_keys == nullptr) return {0, 0};
  // Packs two numbers into one for a single reduction; the second is negated, so that the minimum of both is
  // sought.
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

// A block's keys of a key/value head. The first of a head come first, since most queries see them.
struct KeyTile {
  int sequence, kv_head, key, rows;  // rows: how many exist
  std::int64_t first_row, kv_column;
  ECHELON_HOST_DEVICE KeyTile(const AttentionSizes& s, std::int64_t block) {
    const TileOfHead at(block, s.batch, s.num_kv_heads, s.tiles_of(s.kv_len), s.heads_together);
    sequence = at.sequence;
    kv_head = at.head;
    key = at.tile * s.tile;
    rows = Smaller()(static_cast<int>(s.kv_len) - key, s.tile);
    first_row = sequence * s.kv_batch_stride + key;
    kv_column = static_cast<std::int64_t>(kv_head) * s.head_dim;
  }
};

// For the queries of a tile; missing queries see no key.
template <int queries>
struct OfQueries {
  static_assert(queries % 2 == 0);
  struct alignas(16) Pair {
    OfQuery of[2];
  };
  Pair pairs[queries / 2];
  int first[queries], end[queries];
};

// The tiles of `queries` queries, over all heads that read a block's keys, in which some query may see one of
// the keys.
template <int queries>
class QueryTiles {
 public:
  // A tile: its number of queries, an upper bound of their first visible keys, and the end of the keys that
  // the last one sees.
  struct Place {
    int head, query, rows, latest_first, end_key;
  };

  ECHELON_HOST_DEVICE QueryTiles(const AttentionSizes& s, const KeyTile& at)
      : s_(s),
        sequence_(at.sequence),
        first_query_(at.key < s.q_offset ? 0 : static_cast<int>((at.key - s.q_offset) / queries * queries)),
        first_head_(at.kv_head * static_cast<int>(s.num_heads / s.num_kv_heads)),
        end_head_(first_head_ + static_cast<int>(s.num_heads / s.num_kv_heads)),
        key_(at.key),
        end_key_(at.key + at.rows) {}

  template <class Team>
  ECHELON_HOST_DEVICE Place first(const Team& team) const {
    return seek(team, first_head_, first_query_);
  }
  template <class Team>
  ECHELON_HOST_DEVICE Place behind(const Team& team, const Place& at) const {
    return seek(team, at.head, at.query + queries);
  }
  ECHELON_HOST_DEVICE bool has(const Place& at) const { return at.head < end_head_; }

  // Fetches queries, or their gradients.
  template <class Team, class Columns, class Rows>
  ECHELON_HOST_DEVICE void fetch(const Team& team, const Columns& from, const Place& at,
                                 const Rows& to) const {
    from.fetch(team, sequence_ * s_.q_len + at.query, at.rows, to, queries,
               static_cast<std::int64_t>(at.head) * s_.head_dim);
  }

 private:
  template <class Team>
  ECHELON_HOST_DEVICE Place seek(const Team& team, int head, int query) const {
    const auto q_len = static_cast<int>(s_.q_len);
    for (; head < end_head_; ++head, query = first_query_)
      for (; query < q_len; query += queries) {
        const int rows = Smaller()(q_len - query, queries), end_key = end_key_of(s_, query + rows - 1);
        if (end_key <= key_) continue;
        const FirstKeys first = first_keys_of(team, s_, sequence_, query, rows);
        if (first.earliest < end_key_) return {head, query, rows, first.latest, end_key};
      }
    return {head, 0, 0, 0, 0};
  }

  const AttentionSizes& s_;
  int sequence_, first_query_, first_head_, end_head_, key_, end_key_;
};

// What a lane loads for a tile's queries: read early, and written to shared memory once it has arrived.
template <int queries>
class QueryNotes {
 public:
  template <class Team>
  ECHELON_HOST_DEVICE void take(const Team& team, const AttentionSizes& s, const float* lse,
                                const float* delta, int sequence,
                                const typename QueryTiles<queries>::Place& at) {
    each(team, [&](Note& note, int i) {
      const std::int64_t softmax = s.softmax(sequence, at.head, at.query + i);
      const bool is = i < at.rows;
      note = {is ? lse[softmax] : 0.0f, is ? delta[softmax] : 0.0f,
              is ? static_cast<int>(s.first_key(sequence, at.query + i)) : 0,
              is ? end_key_of(s, at.query + i) : 0};
    });
  }
  template <class Team>
  ECHELON_HOST_DEVICE void leave(const Team& team, OfQueries<queries>& of) {
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
  static constexpr int most = queries / warp_lanes;  // if a block is one warp
  Note notes_[most] = {};
};

}  // namespace echelon::rows
