#include "tensor/attention_cpu.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "tensor/matmul_onednn.h"
#include "tensor/simd.h"

namespace echelon {
namespace {

// Queries and keys of a tile, by measurement: products of this size run at 93% of a large product's speed,
// two tiles of scores stay in a 1 MiB L2 cache, and a diagonal tile wastes at most query_block^2 / 2 scores.
constexpr std::int64_t query_block = 128;
constexpr std::int64_t key_block = 512;
constexpr std::int64_t tile = query_block * key_block;

// One head of one sequence: rows stand `stride` floats apart.
struct Head {
  float* data = nullptr;
  std::int64_t stride = 0;
  float* row(std::int64_t i) const { return data + i * stride; }
};

Head head_of(const Tensor& x, std::int64_t first_row, std::int64_t head, std::int64_t head_dim) {
  return {x.host<float>() + first_row * x.row_stride() + head * head_dim, x.row_stride()};
}

Head query_head(const Tensor& x, const AttentionShape& s, std::int64_t sequence, std::int64_t head) {
  return head_of(x, sequence * s.q_len, head, s.head_dim);
}

Head key_head(const Tensor& x, const AttentionShape& s, std::int64_t sequence, std::int64_t kv_head) {
  return head_of(x, sequence * (s.kv_batch_stride > 0 ? s.kv_batch_stride : s.kv_len), kv_head, s.head_dim);
}

// What each query of one sequence sees.
class Mask {
 public:
  Mask(const AttentionShape& s, std::int64_t sequence)
      : q_offset_(s.q_offset),
        kv_len_(s.kv_len),
        first_(s.first_keys.defined() ? s.first_keys.host<std::int32_t>() + sequence * s.q_len : nullptr) {}

  // Keys [first_key(t), end_key(t)) of query t; none where the end is not after the first.
  std::int64_t first_key(std::int64_t t) const { return first_ == nullptr ? 0 : first_[t]; }
  std::int64_t end_key(std::int64_t t) const {
    return std::clamp<std::int64_t>(q_offset_ + t + 1, 0, kv_len_);
  }
  // What queries [begin, end) see together.
  std::int64_t first_key(std::int64_t begin, std::int64_t end) const {
    return first_ == nullptr ? 0 : *std::min_element(first_ + begin, first_ + end);
  }

  // For query t, the scores of keys [first, first + cols): calls pass(begin, visible, n) for the rest of the
  // row from `begin` on, a vector's boundary. What lies ahead of the first visible key is zero afterwards, in
  // `also` too.
  template <class Pass>
  void on_visible(std::int64_t t, std::int64_t first, std::int64_t cols, float* row, float* also,
                  const Pass& pass) const {
    const std::int64_t end = std::clamp<std::int64_t>(end_key(t) - first, 0, cols);
    const std::int64_t hidden = std::clamp<std::int64_t>(first_key(t) - first, 0, end);
    constexpr std::int64_t vector = 64;  // at least the widest one's elements
    const std::int64_t skipped = hidden == end ? end / vector * vector : hidden / vector * vector;
    std::fill(row + skipped, row + hidden, unseen);
    pass(skipped, hidden == end ? 0 : end - skipped, cols - skipped);
    for (float* x : {row, also})
      if (x != nullptr) std::fill_n(x, hidden, 0.0f);
  }

 private:
  static constexpr float unseen = -1e30f;  // a score below all others
  std::int64_t q_offset_, kv_len_;
  const std::int32_t* first_;
};

// c (m, n) = alpha x (m, k) y (n, k)^T
bool scores(Head x, Head y, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float* c) {
  return multiply({.tb = Transpose::yes,
                   .m = m,
                   .n = n,
                   .k = k,
                   .alpha = alpha,
                   .a = x.data,
                   .a_stride = x.stride,
                   .b = y.data,
                   .b_stride = y.stride,
                   .beta = 0,
                   .c = c,
                   .c_stride = key_block});
}

// to (m, n) = beta to + alpha p (m, k) y (k, n)
bool weigh(const float* p, Head y, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, float beta,
           Head to) {
  return multiply({.m = m,
                   .n = n,
                   .k = k,
                   .alpha = alpha,
                   .a = p,
                   .a_stride = key_block,
                   .b = y.data,
                   .b_stride = y.stride,
                   .beta = beta,
                   .c = to.data,
                   .c_stride = to.stride});
}

// to (m, n) += alpha p (k, m)^T y (k, n)
bool weigh_transposed(const float* p, Head y, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                      Head to) {
  return multiply({.ta = Transpose::yes,
                   .m = m,
                   .n = n,
                   .k = k,
                   .alpha = alpha,
                   .a = p,
                   .a_stride = key_block,
                   .b = y.data,
                   .b_stride = y.stride,
                   .beta = 1,
                   .c = to.data,
                   .c_stride = to.stride});
}

// The queries [begin, end) of one head, all their keys.
bool forward_block(const AttentionShape& s, const Mask& mask, Head q, Head k, Head v, Head out, float* lse,
                   std::int64_t begin, std::int64_t end, float* score) {
  const Simd& pass = simd();
  const std::int64_t rows = end - begin, depth = s.head_dim;
  float max[query_block], sum[query_block];
  for (std::int64_t r = 0; r < rows; ++r) {  // earlier keys are one that weighs exp(lse)
    const bool begun = s.accumulate && std::isfinite(lse[begin + r]);
    max[r] = begun ? lse[begin + r] : std::numeric_limits<float>::lowest();
    sum[r] = begun ? 1.0f : 0.0f;
  }
  const std::int64_t first_key = mask.first_key(begin, end), last_key = mask.end_key(end - 1);
  bool ok = true, has_out = s.accumulate;
  for (std::int64_t first = first_key; first < last_key; first += key_block) {
    const std::int64_t cols = std::min(key_block, last_key - first);
    ok &= scores({q.row(begin), q.stride}, {k.row(first), k.stride}, rows, cols, depth,
                 static_cast<float>(s.scale), score);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* row = score + r * key_block;
      mask.on_visible(begin + r, first, cols, row, nullptr,
                      [&](std::int64_t at, std::int64_t visible, std::int64_t n) {
                        const float correction = pass.softmax_row(row + at, visible, n, &max[r], &sum[r]);
                        if (has_out && correction != 1.0f) pass.scale(out.row(begin + r), correction, depth);
                      });
    }
    ok &= weigh(score, {v.row(first), v.stride}, rows, depth, cols, 1.0f, has_out ? 1.0f : 0.0f,
                {out.row(begin), out.stride});
    has_out = true;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    if (sum[r] > 0) {
      if (sum[r] != 1.0f) pass.scale(out.row(begin + r), 1.0f / sum[r], depth);
      lse[begin + r] = max[r] + std::log(sum[r]);
    } else {  // sees no key
      std::fill_n(out.row(begin + r), depth, 0.0f);
      lse[begin + r] = -std::numeric_limits<float>::infinity();
    }
  }
  return ok;
}

struct QueryHead {
  Head q, dout, dq;
  const float *lse, *delta;
};

// One tile of the backward pass: queries [begin, end) against keys [first, first + key_block). Adds to the
// gradients.
bool backward_tile(const AttentionShape& s, const Mask& mask, const QueryHead& h, Head k, Head v, Head dk,
                   Head dv, std::int64_t begin, std::int64_t end, std::int64_t first, float* score,
                   float* gradient) {
  const Simd& pass = simd();
  const std::int64_t rows = end - begin, depth = s.head_dim;
  const std::int64_t cols = std::min(key_block, mask.end_key(end - 1) - first);
  const float factor = static_cast<float>(s.scale);
  const Head q{h.q.row(begin), h.q.stride}, dout{h.dout.row(begin), h.dout.stride};
  const Head keys{k.row(first), k.stride}, values{v.row(first), v.stride};
  bool ok = scores(q, keys, rows, cols, depth, factor, score);
  ok &= scores(dout, values, rows, cols, depth, 1.0f, gradient);
  for (std::int64_t r = 0; r < rows; ++r) {
    float *p = score + r * key_block, *dp = gradient + r * key_block;
    mask.on_visible(
        begin + r, first, cols, p, dp, [&](std::int64_t at, std::int64_t visible, std::int64_t n) {
          pass.softmax_gradient_row(p + at, dp + at, visible, n, h.lse[begin + r], h.delta[begin + r]);
        });
  }
  ok &= weigh_transposed(score, dout, cols, depth, rows, 1.0f, {dv.row(first), dv.stride});
  ok &= weigh_transposed(gradient, q, cols, depth, rows, factor, {dk.row(first), dk.stride});
  ok &= weigh(gradient, keys, rows, depth, cols, factor, 1.0f, {h.dq.row(begin), h.dq.stride});
  return ok;
}

void zero(Head x, std::int64_t begin, std::int64_t end, std::int64_t depth) {
  for (std::int64_t i = begin; i < end; ++i) std::fill_n(x.row(i), depth, 0.0f);
}

}  // namespace

std::int64_t attention_scratch_per_thread() { return 2 * tile; }

void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
                       const Tensor& out, const Tensor& lse, const Tensor& scratch, int threads) {
  const std::int64_t group = s.num_heads / s.num_kv_heads;
  const std::int64_t blocks = (s.q_len + query_block - 1) / query_block, heads = s.batch * s.num_heads;
  const auto one_block = [&](std::int64_t i, float* score) {
    // Late blocks see the most keys: they come first, so that the threads end together.
    const std::int64_t block = blocks - 1 - i / heads, sequence = i % heads / s.num_heads,
                       head = i % s.num_heads;
    const std::int64_t begin = block * query_block, end = std::min(begin + query_block, s.q_len);
    return forward_block(s, Mask(s, sequence), query_head(q, s, sequence, head),
                         key_head(k, s, sequence, head / group), key_head(v, s, sequence, head / group),
                         query_head(out, s, sequence, head),
                         lse.host<float>() + (sequence * s.num_heads + head) * s.q_len, begin, end, score);
  };
  bool ok = true;
  if (threads == 1) {
    for (std::int64_t i = 0; i < blocks * heads; ++i) ok &= one_block(i, scratch.host<float>());
  } else {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(&& : ok)
    for (std::int64_t i = 0; i < blocks * heads; ++i)
      ok = one_block(i, scratch.host<float>() + omp_get_thread_num() * attention_scratch_per_thread()) && ok;
  }
  if (!ok) fail("out of memory: oneDNN has none left for attention");
}

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                        const Tensor& lse, const Tensor& delta, const AttentionShape& s, const Tensor& dq,
                        const Tensor& dk, const Tensor& dv, const Tensor& scratch, int threads) {
  const std::int64_t group = s.num_heads / s.num_kv_heads, depth = s.head_dim;
  // A key/value head's gradient is a sum over its query heads: one thread adds them in order.
  const auto one_kv_head = [&](std::int64_t i, float* score) {
    const std::int64_t sequence = i / s.num_kv_heads, kv_head = i % s.num_kv_heads;
    const Head dk_head = key_head(dk, s, sequence, kv_head), dv_head = key_head(dv, s, sequence, kv_head);
    const Head k_head = key_head(k, s, sequence, kv_head), v_head = key_head(v, s, sequence, kv_head);
    const Mask mask(s, sequence);
    if (!s.accumulate) {
      zero(dk_head, 0, s.kv_len, depth), zero(dv_head, 0, s.kv_len, depth);
      for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
        zero(query_head(dq, s, sequence, head), 0, s.q_len, depth);
    }
    bool ok = true;
    for (std::int64_t first = 0; first < s.kv_len; first += key_block)
      for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const std::int64_t of_head = (sequence * s.num_heads + head) * s.q_len;
        const QueryHead h{query_head(q, s, sequence, head), query_head(dout, s, sequence, head),
                          query_head(dq, s, sequence, head), lse.host<float>() + of_head,
                          delta.host<float>() + of_head};
        for (std::int64_t begin = 0; begin < s.q_len; begin += query_block) {
          const std::int64_t end = std::min(begin + query_block, s.q_len);
          if (mask.end_key(end - 1) > first && mask.first_key(begin, end) < first + key_block)
            ok &= backward_tile(s, mask, h, k_head, v_head, dk_head, dv_head, begin, end, first, score,
                                score + tile);
        }
      }
    return ok;
  };
  const std::int64_t pairs = s.batch * s.num_kv_heads;
  bool ok = true;
  if (threads == 1) {
    for (std::int64_t i = 0; i < pairs; ++i) ok &= one_kv_head(i, scratch.host<float>());
  } else {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(&& : ok)
    for (std::int64_t i = 0; i < pairs; ++i)
      ok =
          one_kv_head(i, scratch.host<float>() + omp_get_thread_num() * attention_scratch_per_thread()) && ok;
  }
  if (!ok) fail("out of memory: oneDNN has none left for the backward pass of attention");
}

}  // namespace echelon
