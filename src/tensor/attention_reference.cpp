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

std::int64_t visible_keys(const AttentionShape& s, std::int64_t query) {
  return std::clamp<std::int64_t>(s.q_offset + query + 1, 0, s.kv_len);
}

template <class F>
F dot(const F* x, const F* y, std::int64_t count) {
  F sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

template <class F>
void add_scaled(F factor, const F* x, F* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

// body(query, first key, key after the last) for every query of every head.
struct Query {
  std::int64_t row, column;          // of q, out and their gradients
  std::int64_t key_row, key_column;  // of its sequence's key 0
  std::int64_t index;                // into lse and delta
};
template <class Body>
void for_each_query(const AttentionShape& s, const Body& body) {
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.num_heads; ++h)
      for (std::int64_t t = 0; t < s.q_len; ++t) {
        const std::int64_t row = b * s.q_len + t;
        body(Query{row, h * s.head_dim, b * batch_stride(s), h / (s.num_heads / s.num_kv_heads) * s.head_dim,
                   (b * s.num_heads + h) * s.q_len + t},
             s.first_keys.defined() ? s.first_keys.host<std::int32_t>()[row] : 0, visible_keys(s, t));
      }
}

}  // namespace

template <class F>
void reference_attention(const Tensor& tq, const Tensor& tk, const Tensor& tv, const AttentionShape& shape,
                         const Tensor& tout, const Tensor& tlse) {
  const Matrix<F> q(tq), k(tk), v(tv), out(tout);
  F* lse = tlse.host<F>();
  const std::int64_t head_dim = shape.head_dim;
  std::vector<F> weights(static_cast<std::size_t>(shape.kv_len));

  for_each_query(shape, [&](const Query& at, std::int64_t first, std::int64_t end) {
    F* p = weights.data();
    // What earlier calls found is one more key, whose score is their lse and whose value is their out.
    const F earlier = shape.accumulate ? lse[at.index] : -std::numeric_limits<F>::infinity();
    F max = earlier;
    for (std::int64_t j = first; j < end; ++j) {
      p[j] = F(shape.scale) * dot(q[at.row] + at.column, k[at.key_row + j] + at.key_column, head_dim);
      max = std::max(max, p[j]);
    }
    const bool begun = std::isfinite(earlier);
    const F kept = begun ? std::exp(earlier - max) : F(0);
    F sum = kept;
    for (std::int64_t j = first; j < end; ++j) sum += p[j] = std::exp(p[j] - max);
    lse[at.index] = max + std::log(sum);  // no key: -infinity

    F* result = out[at.row] + at.column;
    for (std::int64_t i = 0; i < head_dim; ++i) result[i] = begun ? result[i] * (kept / sum) : F(0);
    for (std::int64_t j = first; j < end; ++j)
      add_scaled(p[j] / sum, v[at.key_row + j] + at.key_column, result, head_dim);
  });
}

template <class F>
void reference_attention_delta(const Tensor& tout, const Tensor& tdout, const AttentionShape& shape,
                               const Tensor& tdelta) {
  const Matrix<F> out(tout), dout(tdout);
  F* delta = tdelta.host<F>();
  for_each_query(shape, [&](const Query& at, std::int64_t, std::int64_t) {
    delta[at.index] = dot(out[at.row] + at.column, dout[at.row] + at.column, shape.head_dim);
  });
}

// With p = softmax(s), s = scale q.k: dv_j = sum_t p_tj dout_t, ds_tj = p_tj (dout_t.v_j - delta_t), and dq,
// dk follow from ds. delta_t is the sum over j of p_tj dout_t.v_j (FlashAttention, Dao 2022, appendix B).
template <class F>
void reference_attention_backward(const Tensor& tq, const Tensor& tk, const Tensor& tv, const Tensor& tdout,
                                  const Tensor& tlse, const Tensor& tdelta, const AttentionShape& shape,
                                  const Tensor& tdq, const Tensor& tdk, const Tensor& tdv) {
  const Matrix<F> q(tq), k(tk), v(tv), dout(tdout), dq(tdq), dk(tdk), dv(tdv);
  const F *lse = tlse.host<F>(), *delta = tdelta.host<F>();
  const std::int64_t head_dim = shape.head_dim;

  if (!shape.accumulate) {
    for (std::int64_t row = 0; row < dq.rows; ++row) std::fill_n(dq[row], dq.cols, F(0));
    for (std::int64_t b = 0; b < shape.batch; ++b)
      for (std::int64_t j = 0; j < shape.kv_len; ++j) {
        std::fill_n(dk[b * batch_stride(shape) + j], dk.cols, F(0));
        std::fill_n(dv[b * batch_stride(shape) + j], dv.cols, F(0));
      }
  }

  for_each_query(shape, [&](const Query& at, std::int64_t first, std::int64_t end) {
    const F* query = q[at.row] + at.column;
    const F* gradient = dout[at.row] + at.column;
    for (std::int64_t j = first; j < end; ++j) {
      const std::int64_t row = at.key_row + j;
      const F* key = k[row] + at.key_column;
      const F p = std::exp(F(shape.scale) * dot(query, key, head_dim) - lse[at.index]);
      const F ds = F(shape.scale) * p * (dot(gradient, v[row] + at.key_column, head_dim) - delta[at.index]);
      add_scaled(p, gradient, dv[row] + at.key_column, head_dim);
      add_scaled(ds, key, dq[at.row] + at.column, head_dim);
      add_scaled(ds, query, dk[row] + at.key_column, head_dim);
    }
  });
}

template void reference_attention<float>(const Tensor&, const Tensor&, const Tensor&, const AttentionShape&,
                                         const Tensor&, const Tensor&);
template void reference_attention_delta<float>(const Tensor&, const Tensor&, const AttentionShape&,
                                               const Tensor&);
template void reference_attention_backward<float>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, const Tensor&, const AttentionShape&,
                                                  const Tensor&, const Tensor&, const Tensor&);
template void reference_attention<double>(const Tensor&, const Tensor&, const Tensor&, const AttentionShape&,
                                          const Tensor&, const Tensor&);
template void reference_attention_delta<double>(const Tensor&, const Tensor&, const AttentionShape&,
                                                const Tensor&);
template void reference_attention_backward<double>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                   const Tensor&, const Tensor&, const AttentionShape&,
                                                   const Tensor&, const Tensor&, const Tensor&);

}  // namespace echelon
