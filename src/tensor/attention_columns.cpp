#include "tensor/attention_columns.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "tensor/attention_heads.h"
#include "tensor/matmul_simd.h"
#include "tensor/score_columns.h"

namespace echelon {
namespace attention_columns {
namespace {

using Size = std::int64_t;
using Word = std::uint32_t;

constexpr Size panel = ScoreColumns::queries;
constexpr Size group = 16;  // contiguous words of a line
// Keys whose scores stay in a cache while they are used; and panels of queries that are summed together in
// gradients of keys.
constexpr Size keys_at_once = 256, panels_at_once = 4, queries_at_once = panels_at_once * panel;
constexpr Size most_depth = 256;

constexpr Size rounded_up(Size n, Size multiple) { return (n + multiple - 1) / multiple * multiple; }

// How elements are packed: into how many words, and by which passes.
template <class T>
struct Packed {
  // In which so many elements of a line are; by parts whole groups.
  static constexpr Size words_of(Size elements) {
    if constexpr (std::is_same_v<T, ThreeParts>)
      return rounded_up(elements, 2 * group) / 2 * parts_of_f32;
    else
      return rounded_up(elements * static_cast<Size>(sizeof(T)), 4) / 4;
  }
  static constexpr Size tile_words = panel * words_of(panel);
  // Of 32 columns of a block of keys, or of queries that are summed together.
  static constexpr Size keys_words = keys_at_once / panel * tile_words,
                        queries_words = panels_at_once * tile_words;

  static auto groups(bool across) {
    if constexpr (std::is_same_v<T, bf16>)
      return across ? matmul_passes().groups_across : matmul_passes().groups_along;
    else if constexpr (std::is_same_v<T, ThreeParts>)
      return across ? avx512_part_passes()->groups_across : avx512_part_passes()->groups_along;
    else
      return across ? matmul_passes().float_groups_across : matmul_passes().float_groups_along;
  }
  static auto floats_along() {
    if constexpr (std::is_same_v<T, bf16>)
      return matmul_passes().widened_along;
    else
      return matmul_passes().floats_along;
  }
  static auto words(bool across) {
    if constexpr (std::is_same_v<T, bf16>)
      return across ? matmul_passes().pairs_across : matmul_passes().pairs_along;
    else if constexpr (std::is_same_v<T, ThreeParts>)
      return across ? avx512_part_passes()->words_across : avx512_part_passes()->words_along;
    else
      return across ? matmul_passes().floats_across : matmul_passes().floats_along;
  }
};

// Lengths of what is packed of so many keys of a head.
template <class T>
struct Lengths {
  Lengths(Size head_dim, Size keys)
      : depth(head_dim),
        words(rounded_up(Packed<T>::words_of(depth), group)),
        tiles((depth + panel - 1) / panel),
        key_blocks((keys + keys_at_once - 1) / keys_at_once) {}

  Size depth, words, tiles;  // words of a row; tiles below each other that make up the depth
  Size key_blocks;

  Size along() const { return key_blocks * keys_at_once * words; }  // words of keys, packed along depth
  // Likewise, packed across it.
  Size across() const { return key_blocks * tiles * Packed<T>::keys_words; }
  Size sums() const { return key_blocks * tiles * keys_at_once * panel; }
};

// Memory that is given out piece by piece, each at a cache line; null: only counted.
class Room {
 public:
  explicit Room(std::byte* begin) : begin_(begin) {}
  template <class T>
  T* take(Size count) {
    constexpr Size line = 64;
    std::byte* const here = begin_ == nullptr ? nullptr : begin_ + taken_;
    // Packing may write one line beyond the end.
    taken_ += rounded_up(count * static_cast<Size>(sizeof(T)), line) + line;
    return reinterpret_cast<T*>(here);
  }
  Size taken() const { return taken_; }

 private:
  std::byte* begin_;
  Size taken_ = 0;
};

// The memory in which a thread works: on the output, or on gradients.
template <class T>
struct Work {
  Work(const Lengths<T>& l, bool output, WantedGradients wanted, std::byte* begin) : room(begin) {
    keys = room.take<Word>(l.along());
    values = room.take<Word>(output ? l.across() : l.along());
    keys_across = room.take<Word>(wanted.queries ? l.across() : 0);
    const Size key_sums = wanted.keys ? l.sums() : 0;
    dk = room.take<float>(key_sums), dv = room.take<float>(key_sums);
    summed = room.take<Size>(wanted.keys ? l.key_blocks : 0);
    for (Size g = 0; g < panels_at_once; ++g) {
      queries[g] = room.take<Word>(l.words * panel), douts[g] = room.take<Word>(l.words * panel);
      sums[g] = room.take<float>(l.tiles * MicroKernel::most_tile);
    }
    queries_across = room.take<Word>(l.tiles * Packed<T>::queries_words);
    douts_across = room.take<Word>(l.tiles * Packed<T>::queries_words);
    scores = room.take<float>(keys_at_once * panel), gradients = room.take<float>(keys_at_once * panel);
    p = room.take<Word>(keys_at_once / panel * Packed<T>::queries_words);
    ds = room.take<Word>(keys_at_once / panel * Packed<T>::queries_words);
    weights = room.take<Word>(Packed<T>::keys_words);
  }

  Room room;
  Word *keys, *values, *keys_across;
  float *dk, *dv;
  Size* summed;  // for each block of keys, how many of its keys have sums in dk and dv; a multiple of `panel`
  Word *queries[panels_at_once], *douts[panels_at_once];
  float* sums[panels_at_once];  // for a panel's queries: a row for each element of depth
  Word *queries_across, *douts_across;
  float *scores, *gradients;
  Word *p, *ds, *weights;
};

// Prefetches rows into the L2 cache. A head's rows are short and far apart, so the processor foresees few.
template <class T>
void fetch(Head<T> x, Size rows, Size depth) {
  constexpr int write = !std::is_const_v<T>, into_l2 = 2;
  constexpr Size line = 64 / sizeof(T);
  for (Size i = 0; i < rows; ++i)
    for (Size j = 0; j < depth; j += line) __builtin_prefetch(x.row(i) + j, write, into_l2);
}

// Rows as panels of a left operand whose k is depth.
template <class T>
void pack_rows(Head<const ElementOf<T>> x, Size rows, const Lengths<T>& l, Word* to) {
  fetch(x, std::min(panel, rows), l.depth);
  for (Size i = 0; i < rows; i += panel) {
    fetch(x.from(i + panel), std::clamp<Size>(rows - i - panel, 0, panel), l.depth);
    Packed<T>::groups(false)(x.row(i), x.stride, std::min(panel, rows - i), l.depth, panel, to + i * l.words);
  }
}
// Blocks of rows as panels of a left operand, transposed: its rows are depth, and its k are rows of x.
template <class T>
void pack_blocks_across(Head<const ElementOf<T>> x, Size rows, const Lengths<T>& l, Word* to) {
  fetch(x, std::min(keys_at_once, rows), l.depth);
  for (Size i = 0; i < rows; i += keys_at_once) {
    fetch(x.from(i + keys_at_once), std::clamp<Size>(rows - i - keys_at_once, 0, keys_at_once), l.depth);
    const Size here = std::min(keys_at_once, rows - i);
    for (Size t = 0; t < l.tiles; ++t) {
      Word* const block = to + (i / keys_at_once * l.tiles + t) * Packed<T>::keys_words;
      Packed<T>::groups(true)(x.row(i) + t * panel, x.stride, std::min(panel, l.depth - t * panel), here,
                              panel, block);
      std::fill(block + rounded_up(Packed<T>::words_of(here), group) * panel,
                block + Packed<T>::words_of(rounded_up(here, panel)) * panel, 0u);
    }
  }
}
// Up to 32 rows as a panel of a right operand whose k is depth.
template <class T>
void pack_panel(Head<const ElementOf<T>> x, Size rows, const Lengths<T>& l, Word* to) {
  Packed<T>::words(false)(x.data, x.stride, rows, l.depth, panel, to);
  std::fill(to + Packed<T>::words_of(l.depth) * panel, to + l.words * panel, 0u);
}
// Rows as panels of a right operand whose k are the rows, and whose columns are depth.
template <class T>
void pack_panels_across(Head<const ElementOf<T>> x, Size rows, const Lengths<T>& l, Word* to) {
  const Size filled = Packed<T>::words_of(rows), words = Packed<T>::words_of(rounded_up(rows, panel));
  for (Size t = 0; t < l.tiles; ++t) {
    Word* const here = to + t * Packed<T>::queries_words;
    Packed<T>::words(true)(x.data + t * panel, x.stride, std::min(panel, l.depth - t * panel), rows, panel,
                           here);
    std::fill(here + filled * panel, here + words * panel, 0u);
  }
}

// Which keys the queries of a panel see.
struct Seen {
  Seen(const Mask& mask, Size begin, Size rows) {
    for (Size i = 0; i < rows; ++i) {
      first[i] = mask.first_key(begin + i), end[i] = std::max(mask.end_key(begin + i), first[i]);
      if (first[i] == end[i]) continue;
      first_of_all = std::min(first_of_all, first[i]), end_of_all = std::max(end_of_all, end[i]);
    }
    most_first = *std::max_element(first, first + panel);
    least_end = *std::min_element(end, end + panel);
  }

  // Whether any of them sees some key of [begin, begin + rows).
  bool sees(Size begin, Size rows) const { return first_of_all < begin + rows && end_of_all > begin; }
  ScoreColumns columns(const float* scores, Size begin, Size rows, float scale) {
    if (most_first <= begin && least_end >= begin + rows)
      return {.scores = scores, .rows = rows, .scale = scale};
    for (Size i = 0; i < panel; ++i) {
      first_here[i] = static_cast<std::int32_t>(std::clamp<Size>(first[i] - begin, 0, rows));
      end_here[i] = static_cast<std::int32_t>(std::clamp<Size>(end[i] - begin, 0, rows));
    }
    return {scores, rows, scale, first_here, end_here, most_first - begin, least_end - begin};
  }

  Size first[panel] = {}, end[panel] = {};
  Size first_of_all = std::numeric_limits<Size>::max(), end_of_all = 0, most_first = 0, least_end = 0;
  std::int32_t first_here[panel], end_here[panel];
};

constexpr WantedGradients no_gradients{false, false};

template <class T>
class Columns {
 public:
  // For some keys of a head, which begin with a block.
  Columns(const ColumnKernels<T>& kernels, const AttentionShape& s, Range keys, WantedGradients wanted,
          std::byte* room)
      : kernel_(*kernels.products),
        passes_(*kernels.scores),
        s_(s),
        keys_(keys),
        wanted_(wanted),
        l_(s.head_dim, keys.size()),
        w_(l_, !wanted.keys && !wanted.queries, wanted, room) {}

  // For query blocks `first`, first + step, ... of head `head`, and all keys.
  void forward(const Mask& mask, Size head, Head<const ElementOf<T>> q, Head<const ElementOf<T>> k,
               Head<const ElementOf<T>> v, Head<ElementOf<T>> out, float* lse, Size first, Size step) {
    slope_ = slope_of(head);
    pack_rows(k, s_.kv_len, l_, w_.keys);
    pack_blocks_across(v, s_.kv_len, l_, w_.values);
    for (Size begin = first * queries_at_once; begin < s_.q_len; begin += step * queries_at_once)
      forward_queries(mask, q, out, lse, begin, std::min(queries_at_once, s_.q_len - begin));
  }

  struct Given {
    Size head;
    Head<const ElementOf<T>> q, dout;
    const float *lse, *delta;
    Head<ElementOf<T>> dq;
  };

  // For these queries, from a block on, of some query heads of a key/value head: head(h) gives query head h.
  template <class HeadOf>
  void backward(const Mask& mask, Head<const ElementOf<T>> k, Head<const ElementOf<T>> v,
                Head<ElementOf<T>> dk, Head<ElementOf<T>> dv, Range heads, const HeadOf& head,
                Range queries) {
    const Size keys = keys_.size();
    pack_rows(k.from(keys_.begin), keys, l_, w_.keys);
    pack_rows(v.from(keys_.begin), keys, l_, w_.values);
    if (wanted_.queries) pack_blocks_across(k.from(keys_.begin), keys, l_, w_.keys_across);
    if (wanted_.keys) {
      std::fill_n(w_.summed, l_.key_blocks, 0);
      dk_ = dk.from(keys_.begin), dv_ = dv.from(keys_.begin);
    }
    for (Size h = heads.begin; h < heads.end; ++h) {
      const Given given = head(h);
      slope_ = slope_of(given.head);
      for (Size begin = queries.begin; begin < queries.end; begin += queries_at_once)
        backward_queries(mask, given, begin, std::min(queries_at_once, queries.end - begin));
    }
    if (!wanted_.keys) return;
    store_keys(w_.dk, static_cast<float>(s_.scale), dk_);
    store_keys(w_.dv, 1, dv_);
  }

 private:
  static constexpr Size tile_words = Packed<T>::tile_words, keys_words = Packed<T>::keys_words,
                        queries_words = Packed<T>::queries_words;

  void column(Size words, const Word* a, Size a_tile, Size tiles, const Word* b, const float* before,
              float* sums) const {
    kernel_.column(
        {.words = words, .a = a, .b = b, .a_tile = a_tile, .tiles = tiles, .before = before, .sums = sums});
  }
  // The number of keys up to `end` of the block that begins with `key`, rounded up to whole tiles.
  static Size rows_up_to(Size end, Size key) { return rounded_up(std::min(keys_at_once, end - key), panel); }
  void multiply_keys(const Word* keys, Size block, Size rows, const Word* panel_of, float* to) const {
    column(l_.words, keys + block * keys_at_once * l_.words, panel * l_.words, rows / panel, panel_of,
           nullptr, to);
  }
  // Before they are multiplied by the scale: panel g's, whose first query is `query`.
  void score(Size block, Size rows, Size g, Size query) const {
    multiply_keys(w_.keys, block, rows, w_.queries[g], w_.scores);
    if (slope_ == 0) return;
    alignas(64) float distances[panel];  // to the block's first key
    for (Size i = 0; i < panel; ++i)
      distances[i] = static_cast<float>(s_.distance(query + i, keys_.begin + block * keys_at_once));
    passes_.lower(w_.scores, rows, distances, static_cast<float>(s_.k_step), slope_);
  }
  float slope_of(Size head) const { return static_cast<float>(s_.alibi.slope(head) / s_.scale); }
  // Sums over keys, a row for each element of depth: the keys packed across depth, times their weights.
  void weigh(const Word* across, Size block, Size rows, float* sums, bool onto) const {
    column(Packed<T>::words_of(rows), across + block * l_.tiles * keys_words, keys_words, l_.tiles,
           w_.weights, onto ? sums : nullptr, sums);
  }

  // What a panel's queries have of the keys up to some block.
  struct Attended {
    Attended(const Mask& mask, Size first, Size count)
        : begin(first), rows(count), seen(mask, first, count) {
      std::fill_n(max, panel, -std::numeric_limits<float>::infinity());
    }

    Size begin, rows;
    Seen seen;
    alignas(64) float max[panel], sum[panel] = {};
    bool has_sums = false;
  };

  // Panels take turns at each block of keys, which stays in a cache meanwhile.
  void forward_queries(const Mask& mask, Head<const ElementOf<T>> q, Head<ElementOf<T>> out, float* lse,
                       Size begin, Size rows) {
    const auto of_panel = [&](Size g) {
      return Attended(mask, begin + g * panel, std::clamp<Size>(rows - g * panel, 0, panel));
    };
    Attended all[panels_at_once] = {of_panel(0), of_panel(1), of_panel(2), of_panel(3)};
    const Size panels = (rows + panel - 1) / panel;
    Size end = 0;
    for (Size g = 0; g < panels; ++g) {
      begin_panel(all[g], g, q, out, lse);
      end = std::max(end, all[g].seen.end_of_all);
    }
    if (kernel_.begin != nullptr) kernel_.begin();
    for (Size block = 0; block * keys_at_once < end; ++block)
      for (Size g = 0; g < panels; ++g) attend(all[g], g, block);
    if (kernel_.end != nullptr) kernel_.end();
    for (Size g = 0; g < panels; ++g) end_panel(all[g], g, out, lse);
  }
  void begin_panel(Attended& a, Size g, Head<const ElementOf<T>> q, Head<ElementOf<T>> out,
                   const float* lse) {
    pack_panel(q.from(a.begin), a.rows, l_, w_.queries[g]);
    const Size next = a.begin + a.rows;
    fetch(q.from(next), std::min(panel, s_.q_len - next), l_.depth);
    if (!s_.accumulate) return fetch(out.from(a.begin), a.rows, l_.depth);
    for (Size i = 0; i < a.rows; ++i)  // earlier keys count as one, with weight exp(lse)
      if (const float earlier = lse[a.begin + i]; earlier != -std::numeric_limits<float>::infinity())
        a.max[i] = earlier / static_cast<float>(s_.scale), a.sum[i] = 1;
    load_turned(out.from(a.begin), a.rows, w_.sums[g]);
    a.has_sums = true;
  }
  void attend(Attended& a, Size g, Size block) {
    const Size key = block * keys_at_once;
    if (key >= a.seen.end_of_all) return;
    const Size here = rows_up_to(a.seen.end_of_all, key);
    if (!a.seen.sees(key, here)) return;
    alignas(64) float factor[panel];
    score(block, here, g, a.begin);
    passes_.softmax(a.seen.columns(w_.scores, key, here, static_cast<float>(s_.scale)), a.max, a.sum, factor,
                    w_.weights);
    if (a.has_sums && std::any_of(factor, factor + panel, [](float f) { return f != 1; }))
      passes_.scale(w_.sums[g], l_.tiles * panel, factor);
    weigh(w_.values, block, here, w_.sums[g], a.has_sums);
    a.has_sums = true;
  }
  void end_panel(const Attended& a, Size g, Head<ElementOf<T>> out, float* lse) const {
    if (s_.accumulate && a.seen.end_of_all == 0) return;
    alignas(64) float factor[panel] = {};
    for (Size i = 0; i < a.rows; ++i) {
      const bool sees_none = a.sum[i] == 0;
      factor[i] = sees_none ? 0 : 1 / a.sum[i];
      lse[a.begin + i] = sees_none ? -std::numeric_limits<float>::infinity()
                                   : static_cast<float>(s_.scale) * a.max[i] + std::log(a.sum[i]);
    }
    if (!a.has_sums) std::fill_n(w_.sums[g], l_.tiles * MicroKernel::most_tile, 0.0f);
    store_turned(w_.sums[g], factor, a.rows, out.from(a.begin));
  }

  void backward_queries(const Mask& mask, const Given& h, Size begin, Size rows) {
    const Size panels = (rows + panel - 1) / panel;
    const auto rows_in = [&](Size g) { return std::min(panel, rows - g * panel); };
    Seen seen[panels_at_once] = {of(mask, begin, rows, 0), of(mask, begin, rows, 1), of(mask, begin, rows, 2),
                                 of(mask, begin, rows, 3)};
    alignas(64) float lse[queries_at_once] = {}, delta[queries_at_once] = {};
    std::copy_n(h.lse + begin, rows, lse), std::copy_n(h.delta + begin, rows, delta);
    bool has_sums[panels_at_once] = {};
    Size first = std::numeric_limits<Size>::max(), end = 0;
    for (Size g = 0; g < panels; ++g)
      first = std::min(first, seen[g].first_of_all), end = std::max(end, seen[g].end_of_all);
    end = std::min(end, keys_.end);
    if (!wanted_.queries && (first >= keys_.end || end <= keys_.begin)) return;
    const Size next = begin + rows, next_rows = std::min(queries_at_once, s_.q_len - next);
    for (Size g = 0; g < panels; ++g) {
      pack_panel(h.q.from(begin + g * panel), rows_in(g), l_, w_.queries[g]);
      pack_panel(h.dout.from(begin + g * panel), rows_in(g), l_, w_.douts[g]);
    }
    if (wanted_.keys) {
      pack_panels_across(h.q.from(begin), rows, l_, w_.queries_across);
      pack_panels_across(h.dout.from(begin), rows, l_, w_.douts_across);
    }
    fetch(h.q.from(next), next_rows, l_.depth);
    fetch(h.dout.from(next), next_rows, l_.depth);
    if (wanted_.queries) fetch(h.dq.from(begin), rows, l_.depth);
    float scale[panel], inverse[panel];
    std::fill_n(scale, panel, static_cast<float>(s_.scale));
    std::fill_n(inverse, panel, static_cast<float>(1 / s_.scale));
    if (kernel_.begin != nullptr) kernel_.begin();
    for (Size block = 0; keys_.begin + block * keys_at_once < end; ++block) {
      const Size key = keys_.begin + block * keys_at_once, here = rows_up_to(end, key);
      if (first >= key + here) continue;
      for (Size g = 0; g < panels; ++g) {
        Word *const p = w_.p + g * tile_words, *const ds = w_.ds + g * tile_words;
        if (!seen[g].sees(key, here)) {
          for (Size t = 0; t < here / panel; ++t)
            std::fill_n(p + t * queries_words, tile_words, 0u),
                std::fill_n(ds + t * queries_words, tile_words, 0u);
          continue;
        }
        score(block, here, g, begin + g * panel);
        multiply_keys(w_.values, block, here, w_.douts[g], w_.gradients);
        passes_.softmax_gradient(seen[g].columns(w_.scores, key, here, static_cast<float>(s_.scale)),
                                 w_.gradients, lse + g * panel, delta + g * panel, p, ds, queries_words,
                                 w_.weights);
        if (!wanted_.queries) continue;
        if (s_.accumulate && !has_sums[g]) {
          load_turned(h.dq.from(begin + g * panel), rows_in(g), w_.sums[g]);
          passes_.scale(w_.sums[g], l_.tiles * panel, inverse);
          has_sums[g] = true;
        }
        weigh(w_.keys_across, block, here, w_.sums[g], has_sums[g]);
        has_sums[g] = true;
      }
      if (!wanted_.keys) continue;
      if (s_.accumulate && w_.summed[block] == 0) load_keys(block);
      add_to_keys(w_.p, w_.douts_across, block, here, panels, w_.dv);
      add_to_keys(w_.ds, w_.queries_across, block, here, panels, w_.dk);
      w_.summed[block] = std::max(w_.summed[block], here);
    }
    if (kernel_.end != nullptr) kernel_.end();
    if (!wanted_.queries) return;
    for (Size g = 0; g < panels; ++g) {
      if (s_.accumulate && !has_sums[g]) continue;
      if (!has_sums[g]) std::fill_n(w_.sums[g], l_.tiles * MicroKernel::most_tile, 0.0f);
      store_turned(w_.sums[g], scale, rows_in(g), h.dq.from(begin + g * panel));
    }
  }
  static Seen of(const Mask& mask, Size begin, Size rows, Size g) {
    return {mask, begin + g * panel, std::clamp<Size>(rows - g * panel, 0, panel)};
  }

  // The sums of block `block`, with elements [t * panel, (t + 1) * panel) of depth, of all keys' sums.
  float* sums_of(float* all, Size block, Size t) const {
    return all + (block * l_.tiles + t) * keys_at_once * panel;
  }
  void add_to_keys(const Word* left, const Word* right, Size block, Size here, Size panels,
                   float* all) const {
    const Size summed = std::min(w_.summed[block], here);
    for (Size t = 0; t < l_.tiles; ++t) {
      const auto add = [&](Size begin, Size end, bool onto) {
        float* const sums = sums_of(all, block, t) + begin * panel;
        column(Packed<T>::words_of(panels * panel), left + begin / panel * queries_words, queries_words,
               (end - begin) / panel, right + t * queries_words, onto ? sums : nullptr, sums);
      };
      if (summed > 0) add(0, summed, true);
      if (here > summed) add(summed, here, false);
    }
  }
  // Rows as columns of floats.
  void load_turned(Head<ElementOf<T>> from, Size rows, float* sums) const {
    Packed<T>::floats_along()(from.data, from.stride, rows, l_.depth, panel, reinterpret_cast<Word*>(sums));
    std::fill(sums + l_.depth * panel, sums + l_.tiles * panel * panel, 0.0f);
  }
  void store_turned(const float* sums, const float* factor, Size rows, Head<ElementOf<T>> to) const {
    passes_.store_turned(sums, factor, l_.depth, rows, to.data, to.stride);
  }
  // For each tile of a block's sums: visit(sums, rows and columns of the tile, where they are in `of`).
  template <class Visit>
  void each_tile_of_keys(float* all, Size block, Head<ElementOf<T>> of, const Visit& visit) const {
    const Size key = block * keys_at_once;
    for (Size t = 0; t < l_.tiles; ++t)
      visit(sums_of(all, block, t), std::min(keys_at_once, keys_.size() - key),
            std::min(panel, l_.depth - t * panel), of.row(key) + t * panel);
  }
  void load_keys(Size block) const {
    const auto load = [&](float* all, double scale, Head<ElementOf<T>> from) {
      each_tile_of_keys(all, block, from, [&](float* sums, Size rows, Size cols, const ElementOf<T>* x) {
        passes_.load_rows(x, from.stride, static_cast<float>(1 / scale), rows, cols, sums);
        std::fill(sums + rows * panel, sums + keys_at_once * panel, 0.0f);
      });
    };
    load(w_.dk, s_.scale, dk_);
    load(w_.dv, 1, dv_);
    w_.summed[block] = keys_at_once;
  }
  void store_keys(float* all, float scale, Head<ElementOf<T>> to) const {
    for (Size block = 0; block < l_.key_blocks; ++block) {
      if (s_.accumulate && w_.summed[block] == 0) continue;
      each_tile_of_keys(all, block, to, [&](float* sums, Size rows, Size cols, ElementOf<T>* x) {
        std::fill(sums + w_.summed[block] * panel, sums + keys_at_once * panel, 0.0f);
        passes_.store_rows(sums, scale, rows, cols, x, to.stride);
      });
    }
  }

  const MicroKernel& kernel_;
  const ScorePasses<T>& passes_;
  const AttentionShape& s_;
  const Range keys_;
  const WantedGradients wanted_;
  const Lengths<T> l_;
  const Work<T> w_;
  Head<ElementOf<T>> dk_, dv_;  // of the first of these keys
  float slope_ = 0;             // ALiBi's, of the current head, divided by the scale
};

template <class T>
Size room_of(const AttentionShape& s, Size keys, bool output, WantedGradients wanted) {
  return Work<T>(Lengths<T>(s.head_dim, keys), output, wanted, nullptr).room.taken();
}

}  // namespace
}  // namespace attention_columns

template <class T>
bool is_made_by_columns(const AttentionShape& s, bool backward, std::int64_t room) {
  using namespace attention_columns;
  if (s.cap != 0 || s.scale <= 0 || s.head_dim > most_depth || s.q_len < panel) return false;
  // In f32 the way without columns adds to gradients in memory: it is faster than what computes scores twice.
  constexpr WantedGradients all{true, true};
  if (backward && std::is_same_v<ElementOf<T>, float>) return room_of<T>(s, s.kv_len, false, all) <= room;
  // Gradients of keys can be computed block by block, but those of a query need all keys that it sees.
  const WantedGradients of_keys{false, true}, of_queries{true, false};
  if (!backward) return room_of<T>(s, s.kv_len, true, no_gradients) <= room;
  return room_of<T>(s, s.kv_len, false, of_queries) <= room &&
         room_of<T>(s, keys_at_once, false, of_keys) <= room;
}

template <class T>
void attention_forward_by_columns(const ColumnKernels<T>& kernels, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const AttentionShape& s, const Tensor& out,
                                  const Tensor& lse, std::byte* rooms, std::int64_t room_step,
                                  const ThreadTeam& team) {
  using namespace attention_columns;
  const Size group_heads = s.num_heads / s.num_kv_heads, heads = s.batch * s.num_heads;
  // Keys are packed again for each part of a head's queries: so there are few parts, but enough for all
  // threads.
  constexpr Size enough = 4;
  const Size blocks = (s.q_len + queries_at_once - 1) / queries_at_once,
             parts = std::clamp<Size>((enough * team.threads() + heads - 1) / heads, 1, blocks);
  team.each_task(heads * parts, [&](Size i, int thread) {
    const Size sequence = i / parts / s.num_heads, head = i / parts % s.num_heads;
    Columns<T>(kernels, s, {0, s.kv_len}, no_gradients, rooms + thread * room_step)
        .forward(Mask(s, sequence), head, query_head<const ElementOf<T>>(q, s, sequence, head),
                 key_head<const ElementOf<T>>(k, s, sequence, head / group_heads),
                 key_head<const ElementOf<T>>(v, s, sequence, head / group_heads),
                 query_head<ElementOf<T>>(out, s, sequence, head),
                 lse.host<float>() + (sequence * s.num_heads + head) * s.q_len, i % parts, parts);
  });
}

template <class T>
void attention_backward_by_columns(const ColumnKernels<T>& kernels, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const Tensor& dout, const Tensor& lse,
                                   const Tensor& delta, const AttentionShape& s, const Tensor& dq,
                                   const Tensor& dk, const Tensor& dv, std::byte* rooms,
                                   std::int64_t room_step, const ThreadTeam& team) {
  using namespace attention_columns;
  const Size group_heads = s.num_heads / s.num_kv_heads, heads = s.batch * s.num_kv_heads;
  // For key/value head `of`, with some of its query heads, queries and keys.
  const auto add = [&](Size of, Range some_heads, Range queries, Range keys, WantedGradients wanted,
                       int thread) {
    const Size sequence = of / s.num_kv_heads, kv_head = of % s.num_kv_heads;
    const auto keys_of = [&](const Tensor& x) {
      return wanted.keys ? key_head<ElementOf<T>>(x, s, sequence, kv_head) : Head<ElementOf<T>>{};
    };
    Columns<T>(kernels, s, keys, wanted, rooms + thread * room_step)
        .backward(
            Mask(s, sequence), key_head<const ElementOf<T>>(k, s, sequence, kv_head),
            key_head<const ElementOf<T>>(v, s, sequence, kv_head), keys_of(dk), keys_of(dv), some_heads,
            [&](Size i) {
              const Size head = kv_head * group_heads + i, at = (sequence * s.num_heads + head) * s.q_len;
              return typename Columns<T>::Given{
                  head,
                  query_head<const ElementOf<T>>(q, s, sequence, head),
                  query_head<const ElementOf<T>>(dout, s, sequence, head),
                  lse.host<float>() + at,
                  delta.host<float>() + at,
                  wanted.queries ? query_head<ElementOf<T>>(dq, s, sequence, head) : Head<ElementOf<T>>{}};
            },
            queries);
  };
  const Range all_heads{0, group_heads}, all_queries{0, s.q_len}, all_keys{0, s.kv_len};
  const WantedGradients wanted{dq.defined(), dk.defined()}, of_keys{false, true}, of_queries{true, false};
  if (room_of<T>(s, s.kv_len, false, wanted) <= room_step &&
      !are_better_apart(heads, team.threads(), wanted)) {
    team.each_task(heads,
                   [&](Size of, int thread) { add(of, all_heads, all_queries, all_keys, wanted, thread); });
    return;
  }
  // What the other gradients need is packed again for each task.
  constexpr Size queries_of_task = 4 * queries_at_once;
  Size keys_of_task = 4 * keys_at_once;
  while (room_of<T>(s, keys_of_task, false, of_keys) > room_step) keys_of_task -= keys_at_once;
  const Size key_tasks = wanted.keys ? (s.kv_len + keys_of_task - 1) / keys_of_task : 0,
             blocks = (s.q_len + queries_of_task - 1) / queries_of_task,
             query_tasks = wanted.queries ? group_heads * blocks : 0;
  team.each_task(heads * (key_tasks + query_tasks), [&](Size i, int thread) {
    const Size of = i % heads, part = i / heads;
    if (part < key_tasks) {
      const Size begin = part * keys_of_task;
      return add(of, all_heads, all_queries, {begin, std::min(begin + keys_of_task, s.kv_len)}, of_keys,
                 thread);
    }
    // Later queries see more keys.
    const Size head = (part - key_tasks) % group_heads, block = blocks - 1 - (part - key_tasks) / group_heads,
               begin = block * queries_of_task, end = std::min(begin + queries_of_task, s.q_len);
    const Mask mask(s, of / s.num_kv_heads);
    const Size last = std::max<Size>(mask.end_key(end - 1), 0),
               first = std::min(mask.first_key(begin, end), last) / keys_at_once * keys_at_once;
    add(of, {head, head + 1}, {begin, end}, {first, last}, of_queries, thread);
  });
}

#define ECHELON_ATTENTION_BY_COLUMNS(T)                                                                   \
  template bool is_made_by_columns<T>(const AttentionShape&, bool, std::int64_t);                         \
  template void attention_forward_by_columns(const ColumnKernels<T>&, const Tensor&, const Tensor&,       \
                                             const Tensor&, const AttentionShape&, const Tensor&,         \
                                             const Tensor&, std::byte*, std::int64_t, const ThreadTeam&); \
  template void attention_backward_by_columns(const ColumnKernels<T>&, const Tensor&, const Tensor&,      \
                                              const Tensor&, const Tensor&, const Tensor&, const Tensor&, \
                                              const AttentionShape&, const Tensor&, const Tensor&,        \
                                              const Tensor&, std::byte*, std::int64_t, const ThreadTeam&);
ECHELON_ATTENTION_BY_COLUMNS(float)
ECHELON_ATTENTION_BY_COLUMNS(bf16)
ECHELON_ATTENTION_BY_COLUMNS(ThreeParts)
#undef ECHELON_ATTENTION_BY_COLUMNS

}  // namespace echelon
