#include "tensor/attention_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "base/error.h"
#include "tensor/attention_columns.h"
#include "tensor/attention_heads.h"
#include "tensor/matmul.h"
#include "tensor/matmul_packed.h"
#include "tensor/matmul_simd.h"
#include "tensor/score_columns.h"
#include "tensor/simd.h"

namespace echelon {
namespace {

// Queries and keys of a tile, chosen by measurement: products of this size run at 93% of a large product's
// speed, two tiles of scores stay in a 1 MiB L2 cache, and a diagonal tile wastes at most query_block^2 / 2
// scores.
constexpr std::int64_t query_block = 128;
constexpr std::int64_t key_block = 512;
// Not a multiple of a large power of two, with which all rows of a tile would compete for a few sets of the
// cache.
constexpr std::int64_t key_stride = key_block + 32;
constexpr std::int64_t placed_keys = 128;  // keys of a tile with a fixed place among all keys
constexpr std::int64_t tile = query_block * key_stride;
// Room for f32 sums that are rounded to bf16 later: rows of a block of queries, and gradients of keys and
// values, of all keys if they fit, such as 8192 keys with heads of 64 columns.
constexpr std::int64_t sum_floats = (query_block + 2 * 8192) * 64;
constexpr float none = -std::numeric_limits<float>::infinity();  // the lse of a query that sees no key

// A thread's products. Under invariant numerics our own kernels compute all of them, since their bits do not
// depend on shapes: how many of a sequence's queries a call has differs from mesh to mesh.
struct Products {
  std::byte* room;
  Numerics numerics;
  bool make(const Product& p) const {
    const bool is_wide = p.a.type == DType::f32 && p.b.type == DType::f32 && p.c.type == DType::f32;
    if (numerics == Numerics::ordinary || !is_wide) return multiply(p, room);
    multiply_by(invariant_micro_kernel(), p, room);
    return true;
  }
};

// The memory in which a thread works. p and ds are the tiles that go into products: in f32 the scores and
// their gradients themselves, in bf16 these rounded.
template <class T>
struct Workspace {
  float *scores, *gradients;
  T *p, *ds;
  float* sums;
  Products products;
};

Workspace<float> workspace(std::byte* room, Numerics numerics, float) {
  auto* const floats = reinterpret_cast<float*>(room + product_scratch_bytes());
  return {floats, floats + tile, floats, floats + tile, nullptr, {room, numerics}};
}
Workspace<bf16> workspace(std::byte* room, Numerics numerics, bf16) {
  auto* const floats = reinterpret_cast<float*>(room + product_scratch_bytes());
  auto* const rounded = reinterpret_cast<bf16*>(floats + 2 * tile + sum_floats);
  return {floats, floats + tile, rounded, rounded + tile, floats + 2 * tile, {room, numerics}};
}

template <class T>
constexpr DType stored_as = std::is_same_v<std::remove_const_t<T>, bf16> ? DType::bf16 : DType::f32;

template <class T>
ConstPanel operand(Head<T> x) {
  return {x.data, x.stride, stored_as<T>};
}
template <class T>
ConstPanel operand(const T* a_tile) {
  return {a_tile, key_stride, stored_as<T>};
}

// c (m, n) = alpha x (m, k) y (n, k)^T
template <class T>
bool scores(Head<const T> x, Head<const T> y, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
            float* c, const Products& products) {
  return products.make({.tb = Transpose::yes,
                        .m = m,
                        .n = n,
                        .k = k,
                        .alpha = alpha,
                        .a = operand(x),
                        .b = operand(y),
                        .c = {c, key_stride}});
}

// to (m, n) = beta to + alpha op(p) (m, k) y (k, n)
template <class T>
bool weigh(const T* p, Transpose turn, Head<const T> y, std::int64_t m, std::int64_t n, std::int64_t k,
           float alpha, float beta, const Panel& to, const Products& products) {
  return products.make({.ta = turn,
                        .m = m,
                        .n = n,
                        .k = k,
                        .alpha = alpha,
                        .a = operand(p),
                        .b = operand(y),
                        .beta = beta,
                        .c = to});
}

// Where rows of a head are summed: for f32 in place, for bf16 in `room`, to be rounded once.
Head<float> sums_of(Head<float> x, std::int64_t, float*) { return x; }
Head<float> sums_of(Head<bf16>, std::int64_t depth, float* room) { return {room, depth}; }

void load_sums(Head<float>, Head<float>, std::int64_t, std::int64_t) {}
void load_sums(Head<bf16> x, Head<float> sums, std::int64_t rows, std::int64_t depth) {
  for (std::int64_t i = 0; i < rows; ++i) simd<bf16>().widen(x.row(i), sums.row(i), depth);
}

void store_sums(Head<float>, Head<float>, std::int64_t, std::int64_t) {}
void store_sums(Head<float> sums, Head<bf16> x, std::int64_t rows, std::int64_t depth) {
  for (std::int64_t i = 0; i < rows; ++i) simd<bf16>().narrow(sums.row(i), x.row(i), depth);
}

template <class T>
Panel panel(Head<T> x) {
  return {x.data, x.stride, stored_as<T>};
}

// The most queries, and keys, of a tile: for bf16, as many as there is room for their sums.
template <class T>
std::int64_t queries_at_once(std::int64_t depth) {
  return std::is_same_v<T, float> ? query_block : std::min(query_block, sum_floats / depth);
}
template <class T>
std::int64_t keys_at_once(std::int64_t depth) {
  return std::is_same_v<T, float> ? key_block : std::min(key_block, sum_floats / 2 / depth / 16 * 16);
}
// Whether so many keys can be handled in one pass over the queries: for bf16, if there is room for their sums
// beside those of a block of queries.
template <class T>
bool are_one_pass(std::int64_t keys, std::int64_t depth) {
  return std::is_same_v<T, float> ? keys <= key_block : (2 * keys + query_block) * depth <= sum_floats;
}

// What ALiBi takes off the scores of some queries and keys.
void lower_scores(const AttentionShape& s, std::int64_t head, Range queries, Range keys, float* scores) {
  const auto slope = static_cast<float>(s.alibi.slope(head));
  for (std::int64_t r = 0; r < queries.size(); ++r)
    wide_simd().lower(scores + r * key_stride, slope, s.distance(queries.begin + r, keys.begin), s.k_step,
                      keys.size());
}

// Queries [begin, end) of head `head`, against all their keys.
template <class T>
bool forward_block(const AttentionShape& s, std::int64_t head, const Mask& mask, Head<const T> q,
                   Head<const T> k, Head<const T> v, Head<T> out, float* lse, std::int64_t begin,
                   std::int64_t end, const Workspace<T>& work) {
  const Simd<T>& pass = simd<T>();
  const std::int64_t rows = end - begin, depth = s.head_dim;
  float max[query_block], sum[query_block];
  for (std::int64_t r = 0; r < rows; ++r) {  // earlier keys count as one, with weight exp(lse)
    const bool begun = s.accumulate && lse[begin + r] != none;  // true for NaN too
    max[r] = begun ? lse[begin + r] : none;
    sum[r] = begun ? 1.0f : 0.0f;
  }
  const Head<float> sums = sums_of(out.from(begin), depth, work.sums);
  if (s.accumulate) load_sums(out.from(begin), sums, rows, depth);
  // Documents begin anywhere, but bf16 tiles begin at multiples of 64. Under invariant numerics all tiles
  // have fixed places among the keys, and a tile that a query does not see does not change its sums: results
  // do not depend on which other queries a block has.
  const bool has_places = work.products.numerics == Numerics::invariant && mask.begins_late();
  const std::int64_t at_once = has_places ? placed_keys : key_block, step = has_places ? placed_keys
                                                                            : std::is_same_v<T, bf16> ? 64
                                                                                                      : 1;
  const std::int64_t first_key = mask.first_key(begin, end) / step * step, last_key = mask.end_key(end - 1);
  bool ok = true, has_out = s.accumulate;
  for (std::int64_t first = first_key; first < last_key; first += at_once) {
    const std::int64_t cols = std::min(at_once, last_key - first);
    ok &= scores(q.from(begin), k.from(first), rows, cols, depth, static_cast<float>(s.scale), work.scores,
                 work.products);
    if (s.cap > 0)
      for (std::int64_t r = 0; r < rows; ++r)
        wide_simd().soft_cap(work.scores + r * key_stride, static_cast<float>(s.cap), cols);
    if (s.alibi.is_used()) lower_scores(s, head, {begin, end}, {first, first + cols}, work.scores);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* row = work.scores + r * key_stride;
      T* p = work.p + r * key_stride;
      mask.on_visible(
          begin + r, first, cols, row, {p}, [&](std::int64_t at, std::int64_t visible, std::int64_t n) {
            const float correction = pass.softmax_row(row + at, visible, n, &max[r], &sum[r], p + at);
            if (has_out && correction != 1.0f)
              simd<float>().scale(sums.row(r), correction, sums.row(r), depth);
          });
    }
    ok &= weigh(work.p, Transpose::no, v.from(first), rows, depth, cols, 1.0f, has_out ? 1.0f : 0.0f,
                panel(sums), work.products);
    has_out = true;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    if (sum[r] == 0) {  // sees no key
      std::fill_n(out.row(begin + r), depth, T{});
      lse[begin + r] = none;
      continue;
    }
    if (sum[r] != 1.0f || stored_as<T> == DType::bf16)
      pass.scale_wide(sums.row(r), 1.0f / sum[r], out.row(begin + r), depth);
    lse[begin + r] = max[r] + std::log(sum[r]);
  }
  return ok;
}

template <class T>
struct QueryHead {
  std::int64_t number;  // among all heads of queries
  Head<const T> q, dout;
  Head<T> dq;
  const float *lse, *delta;
};

// The backward pass of a key/value head of one sequence.
template <class T>
class BackwardOfHead {
 public:
  BackwardOfHead(const AttentionShape& s, std::int64_t sequence, const Workspace<T>& work, Head<const T> k,
                 Head<const T> v, Head<T> dk, Head<T> dv)
      : s_(s), mask_(s, sequence), work_(work), k_(k), v_(v), dk_(dk), dv_(dv) {}

  // Adds the wanted gradients of some keys, and these keys' contributions to the gradients of the heads'
  // queries. In the order of heads, of blocks of queries and of tiles of keys, whatever keys a call has.
  // head(h) gives query head h.
  template <class HeadOf>
  bool add(Range heads, const HeadOf& head, Range queries, Range keys, WantedGradients wanted) const {
    const std::int64_t depth = s_.head_dim;
    const Head<float> dk = wanted.keys ? sums_of(dk_.from(keys.begin), depth, work_.sums) : Head<float>{},
                      dv = wanted.keys
                               ? sums_of(dv_.from(keys.begin), depth, work_.sums + keys.size() * depth)
                               : Head<float>{};
    if (wanted.keys)
      begin_sums(dk_.from(keys.begin), dk, keys.size()), begin_sums(dv_.from(keys.begin), dv, keys.size());
    float* const query_room = work_.sums + (wanted.keys ? 2 * keys.size() * depth : 0);
    bool ok = true;
    for (std::int64_t h = heads.begin; h < heads.end; ++h) {
      const QueryHead<T> of = head(h);
      const std::int64_t rows = queries_at_once<T>(depth);
      for (std::int64_t begin = queries.begin; begin < queries.end; begin += rows) {
        const std::int64_t end = std::min(begin + rows, queries.end);
        const Head<float> dq = wanted.queries ? sums_of(of.dq.from(begin), depth, query_room) : Head<float>{};
        if (wanted.queries && keys.begin == 0) begin_sums(of.dq.from(begin), dq, end - begin);
        ok &= add_tiles(of, {begin, end}, keys, dk, dv, dq, wanted);
        if (wanted.queries) store_sums(dq, of.dq.from(begin), end - begin, depth);
      }
    }
    if (wanted.keys) {
      store_sums(dk, dk_.from(keys.begin), keys.size(), depth);
      store_sums(dv, dv_.from(keys.begin), keys.size(), depth);
    }
    return ok;
  }

 private:
  void begin_sums(Head<T> x, Head<float> sums, std::int64_t rows) const {
    if (s_.accumulate)
      load_sums(x, sums, rows, s_.head_dim);
    else
      clear(panel(sums), rows, s_.head_dim);
  }

  bool add_tiles(const QueryHead<T>& of, Range queries, Range keys, Head<float> dk, Head<float> dv,
                 Head<float> dq, WantedGradients wanted) const {
    const std::int64_t at_once = keys_at_once<T>(s_.head_dim),
                       last = std::min(mask_.end_key(queries.end - 1), keys.end),
                       seen = mask_.first_key(queries.begin, queries.end);
    // The part of a tile that these queries see, from a multiple of 64 on. Tiles keep their places, so that
    // sums are cut in the same way whichever queries a call has.
    constexpr std::int64_t step = 64;
    bool ok = true;
    for (std::int64_t first = keys.begin; first < last; first += at_once) {
      const Range some{std::max(first, seen / step * step), std::min(first + at_once, last)};
      if (some.begin >= some.end) continue;
      const std::int64_t behind = some.begin - keys.begin;
      ok &= add_tile(of, queries, some, dk.from(behind), dv.from(behind), dq, wanted);
    }
    return ok;
  }

  bool add_tile(const QueryHead<T>& of, Range queries, Range some, Head<float> dk, Head<float> dv,
                Head<float> dq, WantedGradients wanted) const {
    const Simd<T>& pass = simd<T>();
    const std::int64_t rows = queries.size(), cols = some.size(), depth = s_.head_dim;
    const float factor = static_cast<float>(s_.scale);
    const Head<const T> q = of.q.from(queries.begin), dout = of.dout.from(queries.begin),
                        keys = k_.from(some.begin), values = v_.from(some.begin);
    bool ok = scores(q, keys, rows, cols, depth, factor, work_.scores, work_.products);
    if (s_.alibi.is_used()) lower_scores(s_, of.number, queries, some, work_.scores);
    ok &= scores(dout, values, rows, cols, depth, 1.0f, work_.gradients, work_.products);
    for (std::int64_t r = 0; r < rows; ++r) {
      float *score = work_.scores + r * key_stride, *gradient = work_.gradients + r * key_stride;
      T *p = work_.p + r * key_stride, *ds = work_.ds + r * key_stride;
      const std::int64_t query = queries.begin + r;
      mask_.on_visible(query, some.begin, cols, score, {p, ds},
                       [&](std::int64_t at, std::int64_t visible, std::int64_t n) {
                         const float lse = of.lse[query], delta = of.delta[query];
                         if (s_.cap > 0)
                           pass.capped_softmax_gradient_row(score + at, gradient + at, visible, n, lse, delta,
                                                            static_cast<float>(s_.cap), p + at, ds + at);
                         else
                           pass.softmax_gradient_row(score + at, gradient + at, visible, n, lse, delta,
                                                     p + at, ds + at);
                       });
    }
    if (wanted.keys) {
      ok &= weigh(work_.p, Transpose::yes, dout, cols, depth, rows, 1.0f, 1.0f, panel(dv), work_.products);
      ok &= weigh(work_.ds, Transpose::yes, q, cols, depth, rows, factor, 1.0f, panel(dk), work_.products);
    }
    if (wanted.queries)
      ok &= weigh(work_.ds, Transpose::no, keys, rows, depth, cols, factor, 1.0f, panel(dq), work_.products);
    return ok;
  }

  const AttentionShape& s_;
  const Mask mask_;
  const Workspace<T>& work_;
  const Head<const T> k_, v_;
  const Head<T> dk_, dv_;
};

// Calls body(task, workspace of its thread) for each task; false if any call returns false.
template <class T, class Body>
bool each_task(std::int64_t tasks, const Tensor& scratch, const ThreadTeam& team, Numerics numerics,
               const Body& body) {
  std::byte* const room = scratch.host<std::byte>();
  std::atomic<bool> ok = true;
  team.each_task(tasks, [&](std::int64_t i, int thread) {
    if (!body(i, workspace(room + thread * attention_scratch_bytes(stored_as<T>), numerics, T{}))) ok = false;
  });
  return ok;
}

template <class T>
bool forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s, const Tensor& out,
             const Tensor& lse, const Tensor& scratch, const ThreadTeam& team, Numerics numerics) {
  const std::int64_t group = s.num_heads / s.num_kv_heads;
  const std::int64_t rows = queries_at_once<T>(s.head_dim);
  const std::int64_t blocks = (s.q_len + rows - 1) / rows, heads = s.batch * s.num_heads;
  return each_task<T>(blocks * heads, scratch, team, numerics, [&](std::int64_t i, const Workspace<T>& work) {
    // Later blocks see more keys: they come first, so that the threads end together.
    const std::int64_t block = blocks - 1 - i / heads, sequence = i % heads / s.num_heads,
                       head = i % s.num_heads;
    const std::int64_t begin = block * rows, end = std::min(begin + rows, s.q_len);
    return forward_block<T>(s, head, Mask(s, sequence), query_head<const T>(q, s, sequence, head),
                            key_head<const T>(k, s, sequence, head / group),
                            key_head<const T>(v, s, sequence, head / group),
                            query_head<T>(out, s, sequence, head),
                            lse.host<float>() + (sequence * s.num_heads + head) * s.q_len, begin, end, work);
  });
}

template <class T>
bool backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout, const Tensor& lse,
              const Tensor& delta, const AttentionShape& s, const Tensor& dq, const Tensor& dk,
              const Tensor& dv, const Tensor& scratch, const ThreadTeam& team, Numerics numerics) {
  const std::int64_t group = s.num_heads / s.num_kv_heads, heads = s.batch * s.num_kv_heads;
  const WantedGradients wanted{dq.defined(), dk.defined()};
  // For key/value head `of`, with some of its query heads, queries and keys.
  const auto add = [&](std::int64_t of, Range of_heads, Range queries, Range keys, WantedGradients here,
                       const Workspace<T>& work) {
    const std::int64_t sequence = of / s.num_kv_heads, kv_head = of % s.num_kv_heads;
    const auto key_head_of = [&](const Tensor& x) {
      return x.defined() ? key_head<T>(x, s, sequence, kv_head) : Head<T>{};
    };
    const BackwardOfHead<T> pass(s, sequence, work, key_head<const T>(k, s, sequence, kv_head),
                                 key_head<const T>(v, s, sequence, kv_head), key_head_of(dk),
                                 key_head_of(dv));
    const auto query_head_at = [&](std::int64_t at) {
      const std::int64_t head = kv_head * group + at, of_head = (sequence * s.num_heads + head) * s.q_len;
      return QueryHead<T>{head,
                          query_head<const T>(q, s, sequence, head),
                          query_head<const T>(dout, s, sequence, head),
                          wanted.queries ? query_head<T>(dq, s, sequence, head) : Head<T>{},
                          lse.host<float>() + of_head,
                          delta.host<float>() + of_head};
    };
    return pass.add(of_heads, query_head_at, queries, keys, here);
  };
  const Range all_heads{0, group}, all_queries{0, s.q_len}, all_keys{0, s.kv_len};
  const std::int64_t keys = keys_at_once<T>(s.head_dim), key_tiles = (s.kv_len + keys - 1) / keys;
  const auto tile_of_keys = [&](std::int64_t i) {
    return Range{i * keys, std::min((i + 1) * keys, s.kv_len)};
  };

  if (are_better_apart(heads, team.threads(), wanted)) {
    const std::int64_t queries = queries_at_once<T>(s.head_dim), blocks = (s.q_len + queries - 1) / queries,
                       of_keys = wanted.keys ? key_tiles : 0,
                       of_queries = wanted.queries ? group * blocks : 0;
    return each_task<T>(
        heads * (of_keys + of_queries), scratch, team, numerics,
        [&](std::int64_t i, const Workspace<T>& work) {
          const std::int64_t of = i % heads, part = i / heads;
          if (part < of_keys) return add(of, all_heads, all_queries, tile_of_keys(part), {false, true}, work);
          // Later queries see more keys.
          const std::int64_t head = (part - of_keys) % group, block = blocks - 1 - (part - of_keys) / group;
          return add(of, {head, head + 1}, {block * queries, std::min((block + 1) * queries, s.q_len)},
                     all_keys, {true, false}, work);
        });
  }
  return each_task<T>(heads, scratch, team, numerics, [&](std::int64_t of, const Workspace<T>& work) {
    if (are_one_pass<T>(s.kv_len, s.head_dim)) return add(of, all_heads, all_queries, all_keys, wanted, work);
    // A tile of keys at a time, which stays in a cache for all queries. For bf16, sums of queries must
    // include all keys before they are stored, so they get a separate pass.
    const bool apart = std::is_same_v<T, bf16>;
    bool ok = true;
    if (wanted.keys || !apart)
      for (std::int64_t i = 0; i < key_tiles; ++i)
        ok &= add(of, all_heads, all_queries, tile_of_keys(i), {wanted.queries && !apart, wanted.keys}, work);
    if (wanted.queries && apart) ok &= add(of, all_heads, all_queries, all_keys, {true, false}, work);
    return ok;
  });
}

// Runs `run` with the fastest kernels of columns that the processor and the shape allow; false if there are
// none, which leaves tiles.
template <class T, class Run>
bool by_columns(Numerics numerics, const AttentionShape& s, bool backward, const Run& run) {
  const auto by = [&]<class Way>(const ColumnKernels<Way>& kernels) {
    if (numerics != Numerics::ordinary || kernels.products == nullptr || kernels.scores == nullptr ||
        !is_made_by_columns<Way>(s, backward, attention_scratch_bytes(dtype_of<T>)))
      return false;
    run(kernels);
    return true;
  };
  if constexpr (std::is_same_v<T, bf16>)
    return by(ColumnKernels<bf16>{bf16_column_kernel(), avx512_score_passes<bf16>()});
  else
    return by(ColumnKernels<ThreeParts>{parts_micro_kernel(), avx512_score_passes<ThreeParts>()}) ||
           by(ColumnKernels<float>{f32_column_kernel(), avx512_score_passes<float>()});
}

template <class T>
void forward_by_either(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
                       const Tensor& out, const Tensor& lse, const Tensor& scratch, const ThreadTeam& team,
                       Numerics numerics) {
  const auto run = [&](const auto& kernels) {
    attention_forward_by_columns(kernels, q, k, v, s, out, lse, scratch.host<std::byte>(),
                                 attention_scratch_bytes(dtype_of<T>), team);
  };
  if (by_columns<T>(numerics, s, false, run)) return;
  if (!forward<T>(q, k, v, s, out, lse, scratch, team, numerics))
    fail("out of memory: oneDNN has none left for attention");
}

template <class T>
void backward_by_either(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                        const Tensor& lse, const Tensor& delta, const AttentionShape& s, const Tensor& dq,
                        const Tensor& dk, const Tensor& dv, const Tensor& scratch, const ThreadTeam& team,
                        Numerics numerics) {
  const auto run = [&](const auto& kernels) {
    attention_backward_by_columns(kernels, q, k, v, dout, lse, delta, s, dq, dk, dv,
                                  scratch.host<std::byte>(), attention_scratch_bytes(dtype_of<T>), team);
  };
  if (by_columns<T>(numerics, s, true, run)) return;
  if (!backward<T>(q, k, v, dout, lse, delta, s, dq, dk, dv, scratch, team, numerics))
    fail("out of memory: oneDNN has none left for the backward pass of attention");
}

}  // namespace

std::int64_t attention_scratch_bytes(DType dtype) {
  const std::int64_t tiles = dtype == DType::f32 ? 2 * tile * 4 : 2 * tile * (4 + 2) + sum_floats * 4;
  return product_scratch_bytes() + tiles;
}

void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
                       const Tensor& out, const Tensor& lse, const Tensor& scratch, const ThreadTeam& team,
                       Numerics numerics) {
  const auto run = out.dtype() == DType::f32 ? forward_by_either<float> : forward_by_either<bf16>;
  run(q, k, v, s, out, lse, scratch, team, numerics);
}

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                        const Tensor& lse, const Tensor& delta, const AttentionShape& s, const Tensor& dq,
                        const Tensor& dk, const Tensor& dv, const Tensor& scratch, const ThreadTeam& team,
                        Numerics numerics) {
  const auto run = dout.dtype() == DType::f32 ? backward_by_either<float> : backward_by_either<bf16>;
  run(q, k, v, dout, lse, delta, s, dq, dk, dv, scratch, team, numerics);
}

}  // namespace echelon
