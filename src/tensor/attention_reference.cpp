#include "tensor/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tensor/reference_view.h"

namespace echelon {
namespace {

std::int64_t batch_stride(const AttentionShape& s) {
  return s.kv_batch_stride > 0 ? s.kv_batch_stride : s.kv_len;
}

template <class T>
Wide<T> dot(const T* x, const T* y, std::int64_t count) {
  Wide<T> sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

template <class T>
void add_scaled(Wide<T> factor, const T* x, Wide<T>* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

// Sums for columns [column, column + cols) of rows [row, row + rows) of an output, which are rounded once,
// when they are stored.
template <class T>
class Sums {
 public:
  Sums(const Matrix<T>& out, std::int64_t rows, std::int64_t cols)
      : out_(out), rows_(rows), cols_(cols), sums_(static_cast<std::size_t>(rows * cols)) {}

  void begin(std::int64_t row, std::int64_t column, bool from_stored) {
    row_ = row;
    column_ = column;
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j < cols_; ++j)
        (*this)[i][j] = from_stored ? Wide<T>(out_[row_ + i][column_ + j]) : Wide<T>(0);
  }
  Wide<T>* operator[](std::int64_t row) { return sums_.data() + row * cols_; }
  void store() {
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j < cols_; ++j) out_[row_ + i][column_ + j] = T((*this)[i][j]);
  }

 private:
  const Matrix<T>& out_;
  const std::int64_t rows_, cols_;
  std::int64_t row_ = 0, column_ = 0;
  std::vector<Wide<T>> sums_;
};

// Calls body(query, first key, end of keys) for every query of the heads that read one key/value head.
struct Query {
  std::int64_t row, column;          // of q, out and their gradients
  std::int64_t key_row, key_column;  // of its sequence's key 0
  std::int64_t index;                // into lse and delta
  std::int64_t head, number;         // its number among the head's queries
};
template <class Body>
void for_each_query_of(const AttentionShape& s, std::int64_t b, std::int64_t kv_head, const Body& body) {
  const std::int64_t heads = s.num_heads / s.num_kv_heads;
  for (std::int64_t h = kv_head * heads; h < (kv_head + 1) * heads; ++h)
    for (std::int64_t t = 0; t < s.q_len; ++t) {
      const std::int64_t row = b * s.q_len + t;
      body(Query{row, h * s.head_dim, b * batch_stride(s), kv_head * s.head_dim,
                 (b * s.num_heads + h) * s.q_len + t, h, t},
           s.first_keys.defined() ? s.first_keys.host<std::int32_t>()[row] : 0, s.end_key(t));
    }
}
// scale q.k of key j, capped if the shape says so, less what ALiBi takes off.
template <class T>
Wide<T> score_of(const AttentionShape& s, const Query& at, std::int64_t j, const Matrix<T>& q,
                 const Matrix<T>& k) {
  using F = Wide<T>;
  const F score = F(s.scale) * dot(q[at.row] + at.column, k[at.key_row + j] + at.key_column, s.head_dim);
  if (s.alibi.is_used()) return score - F(s.alibi.slope(at.head)) * F(s.distance(at.number, j));
  return s.cap > 0 ? F(s.cap) * std::tanh(score / F(s.cap)) : score;
}

template <class Body>
void for_each_query(const AttentionShape& s, const Body& body) {
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t kv_head = 0; kv_head < s.num_kv_heads; ++kv_head)
      for_each_query_of(s, b, kv_head, body);
}

}  // namespace

template <class T>
void reference_attention(const Tensor& tq, const Tensor& tk, const Tensor& tv, const AttentionShape& shape,
                         const Tensor& tout, const Tensor& tlse) {
  using F = Wide<T>;
  const Matrix<T> q(tq), k(tk), v(tv), out(tout);
  F* lse = tlse.host<F>();
  const std::int64_t head_dim = shape.head_dim;
  std::vector<F> weights(static_cast<std::size_t>(shape.kv_len));
  Sums<T> sums(out, 1, head_dim);

  for_each_query(shape, [&](const Query& at, std::int64_t first, std::int64_t end) {
    F* p = weights.data();
    // The result of earlier calls counts as one more key, with their lse as its score and their out as its
    // value.
    const F earlier = shape.accumulate ? lse[at.index] : -std::numeric_limits<F>::infinity();
    F max = earlier;
    for (std::int64_t j = first; j < end; ++j) {
      p[j] = score_of<T>(shape, at, j, q, k);
      max = std::max(max, p[j]);
    }
    const bool begun = earlier != -std::numeric_limits<F>::infinity();  // true for NaN too
    const F kept = begun ? std::exp(earlier - max) : F(0);
    F sum = kept;
    for (std::int64_t j = first; j < end; ++j) sum += p[j] = std::exp(p[j] - max);
    lse[at.index] = max + std::log(sum);  // without keys: -infinity

    sums.begin(at.row, at.column, begun);
    F* result = sums[0];
    if (begun)
      for (std::int64_t i = 0; i < head_dim; ++i) result[i] *= kept / sum;
    for (std::int64_t j = first; j < end; ++j)
      add_scaled(p[j] / sum, v[at.key_row + j] + at.key_column, result, head_dim);
    sums.store();
  });
}

template <class T>
void reference_attention_delta(const Tensor& tout, const Tensor& tdout, const AttentionShape& shape,
                               const Tensor& tdelta) {
  const Matrix<T> out(tout), dout(tdout);
  auto* delta = tdelta.host<Wide<T>>();
  for_each_query(shape, [&](const Query& at, std::int64_t, std::int64_t) {
    delta[at.index] = dot(out[at.row] + at.column, dout[at.row] + at.column, shape.head_dim);
  });
}

// With p = softmax(s), s = scale q.k: dv_j = sum_t p_tj dout_t, ds_tj = p_tj (dout_t.v_j - delta_t), and dq,
// dk follow from ds; a cap has the slope 1 - (s / cap)^2. delta_t is the sum over j of p_tj dout_t.v_j
// (FlashAttention, Dao 2022, appendix B).
template <class T>
void reference_attention_backward(const Tensor& tq, const Tensor& tk, const Tensor& tv, const Tensor& tdout,
                                  const Tensor& tlse, const Tensor& tdelta, const AttentionShape& shape,
                                  const Tensor& tdq, const Tensor& tdk, const Tensor& tdv) {
  using F = Wide<T>;
  const bool of_queries = tdq.defined(), of_keys = tdk.defined();
  const Matrix<T> q(tq), k(tk), v(tv), dout(tdout), dq(of_queries ? tdq : tq), dk(of_keys ? tdk : tk),
      dv(of_keys ? tdv : tv);
  const F *lse = tlse.host<F>(), *delta = tdelta.host<F>();
  const std::int64_t head_dim = shape.head_dim;
  Sums<T> dq_sums(dq, 1, head_dim), dk_sums(dk, shape.kv_len, head_dim), dv_sums(dv, shape.kv_len, head_dim);

  for (std::int64_t b = 0; b < shape.batch; ++b)
    for (std::int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      for (Sums<T>* sums : {&dk_sums, &dv_sums})
        sums->begin(b * batch_stride(shape), kv_head * head_dim, shape.accumulate);
      for_each_query_of(shape, b, kv_head, [&](const Query& at, std::int64_t first, std::int64_t end) {
        const T* query = q[at.row] + at.column;
        const T* gradient = dout[at.row] + at.column;
        dq_sums.begin(at.row, at.column, shape.accumulate);
        for (std::int64_t j = first; j < end; ++j) {
          const std::int64_t row = at.key_row + j;
          const T* key = k[row] + at.key_column;
          const F score = score_of<T>(shape, at, j, q, k), bent = shape.cap > 0 ? score / F(shape.cap) : F(0);
          const F p = std::exp(score - lse[at.index]);
          const F ds = F(shape.scale) * p *
                       (dot(gradient, v[row] + at.key_column, head_dim) - delta[at.index]) *
                       (1 - bent * bent);
          add_scaled(p, gradient, dv_sums[j], head_dim);
          add_scaled(ds, key, dq_sums[0], head_dim);
          add_scaled(ds, query, dk_sums[j], head_dim);
        }
        if (of_queries) dq_sums.store();
      });
      if (!of_keys) continue;
      dk_sums.store();
      dv_sums.store();
    }
}

template decltype(reference_attention<float>) reference_attention<float>;
template decltype(reference_attention_delta<float>) reference_attention_delta<float>;
template decltype(reference_attention_backward<float>) reference_attention_backward<float>;
template decltype(reference_attention<double>) reference_attention<double>;
template decltype(reference_attention_delta<double>) reference_attention_delta<double>;
template decltype(reference_attention_backward<double>) reference_attention_backward<double>;
template decltype(reference_attention<bf16>) reference_attention<bf16>;
template decltype(reference_attention_delta<bf16>) reference_attention_delta<bf16>;
template decltype(reference_attention_backward<bf16>) reference_attention_backward<bf16>;

}  // namespace echelon
