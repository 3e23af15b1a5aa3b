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

void check_shape(const AttentionShape& s) {
  check(s.batch >= 0 && s.q_len >= 0 && s.kv_len >= 0 && s.head_dim > 0, "attention: a size is negative");
  check(s.num_kv_heads > 0 && s.num_heads > 0 && s.num_heads % s.num_kv_heads == 0,
        "attention: query heads do not divide over key/value heads");
  check(batch_stride(s) >= s.kv_len, "attention: kv_batch_stride is below kv_len");
}

template <class F>
void check_queries(const Matrix<F>& x, const AttentionShape& s) {
  check(x.rows == s.batch * s.q_len && x.cols == s.num_heads * s.head_dim,
        "attention: shape of q, out or a gradient");
}

// A cache may hold more rows after the last sequence's keys.
template <class F>
void check_keys(const Matrix<F>& x, const AttentionShape& s) {
  const std::int64_t rows = s.batch == 0 ? 0 : (s.batch - 1) * batch_stride(s) + s.kv_len;
  check(x.rows >= rows && x.cols == s.num_kv_heads * s.head_dim, "attention: shape of k, v or a gradient");
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

// body(query row, first key row, visible keys, query head's first column, key head's first column, index into
// lse) for every query of every head.
template <class Body>
void for_each_query(const AttentionShape& s, const Body& body) {
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.num_heads; ++h)
      for (std::int64_t t = 0; t < s.q_len; ++t)
        body(b * s.q_len + t, b * batch_stride(s), visible_keys(s, t), h * s.head_dim,
             h / (s.num_heads / s.num_kv_heads) * s.head_dim, (b * s.num_heads + h) * s.q_len + t);
}

}  // namespace

template <class F>
void reference_attention(const Tensor& tq, const Tensor& tk, const Tensor& tv, const AttentionShape& shape,
                         const Tensor& tout, const Tensor& tlse) {
  const Matrix<F> q(tq), k(tk), v(tv), out(tout);
  check_shape(shape);
  check_queries(q, shape), check_queries(out, shape);
  check_keys(k, shape), check_keys(v, shape);
  F* lse = flat<F>(tlse, shape.batch * shape.num_heads * shape.q_len);
  const std::int64_t head_dim = shape.head_dim;
  std::vector<F> weights(static_cast<std::size_t>(shape.kv_len));

  for_each_query(shape, [&](std::int64_t row, std::int64_t first_key, std::int64_t visible,
                            std::int64_t q_column, std::int64_t kv_column, std::int64_t index) {
    F* p = weights.data();
    F max = -std::numeric_limits<F>::infinity();
    for (std::int64_t j = 0; j < visible; ++j) {
      p[j] = F(shape.scale) * dot(q[row] + q_column, k[first_key + j] + kv_column, head_dim);
      max = std::max(max, p[j]);
    }
    F sum = 0;
    for (std::int64_t j = 0; j < visible; ++j) sum += p[j] = std::exp(p[j] - max);
    lse[index] = max + std::log(sum);  // no key: -infinity

    F* result = out[row] + q_column;
    std::fill_n(result, head_dim, F(0));
    for (std::int64_t j = 0; j < visible; ++j)
      add_scaled(p[j] / sum, v[first_key + j] + kv_column, result, head_dim);
  });
}

// With p = softmax(s), s = scale q.k: dv_j = sum_t p_tj dout_t, ds_tj = p_tj (dout_t.v_j - dout_t.out_t), and
// dq, dk follow from ds. The sum over j that the softmax's gradient needs is dout_t.out_t (FlashAttention,
// Dao 2022, appendix B).
template <class F>
void reference_attention_backward(const Tensor& tq, const Tensor& tk, const Tensor& tv, const Tensor& tout,
                                  const Tensor& tdout, const Tensor& tlse, const AttentionShape& shape,
                                  const Tensor& tdq, const Tensor& tdk, const Tensor& tdv) {
  const Matrix<F> q(tq), k(tk), v(tv), out(tout), dout(tdout), dq(tdq), dk(tdk), dv(tdv);
  check_shape(shape);
  for (const Matrix<F>* x : {&q, &out, &dout, &dq}) check_queries(*x, shape);
  for (const Matrix<F>* x : {&k, &v, &dk, &dv}) check_keys(*x, shape);
  const F* lse = flat<F>(tlse, shape.batch * shape.num_heads * shape.q_len);
  const std::int64_t head_dim = shape.head_dim;

  for (std::int64_t row = 0; row < dq.rows; ++row) std::fill_n(dq[row], dq.cols, F(0));
  for (std::int64_t b = 0; b < shape.batch; ++b)
    for (std::int64_t j = 0; j < shape.kv_len; ++j) {
      std::fill_n(dk[b * batch_stride(shape) + j], dk.cols, F(0));
      std::fill_n(dv[b * batch_stride(shape) + j], dv.cols, F(0));
    }

  for_each_query(shape, [&](std::int64_t row, std::int64_t first_key, std::int64_t visible,
                            std::int64_t q_column, std::int64_t kv_column, std::int64_t index) {
    const F* query = q[row] + q_column;
    const F* gradient = dout[row] + q_column;
    const F mean = dot(gradient, out[row] + q_column, head_dim);
    for (std::int64_t j = 0; j < visible; ++j) {
      const F* key = k[first_key + j] + kv_column;
      const F p = std::exp(F(shape.scale) * dot(query, key, head_dim) - lse[index]);
      const F ds = F(shape.scale) * p * (dot(gradient, v[first_key + j] + kv_column, head_dim) - mean);
      add_scaled(p, gradient, dv[first_key + j] + kv_column, head_dim);
      add_scaled(ds, key, dq[row] + q_column, head_dim);
      add_scaled(ds, query, dk[first_key + j] + kv_column, head_dim);
    }
  });
}

template void reference_attention<float>(const Tensor&, const Tensor&, const Tensor&, const AttentionShape&,
                                         const Tensor&, const Tensor&);
template void reference_attention<double>(const Tensor&, const Tensor&, const Tensor&, const AttentionShape&,
                                          const Tensor&, const Tensor&);
template void reference_attention_backward<float>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, const Tensor&, const AttentionShape&,
                                                  const Tensor&, const Tensor&, const Tensor&);
template void reference_attention_backward<double>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                   const Tensor&, const Tensor&, const AttentionShape&,
                                                   const Tensor&, const Tensor&, const Tensor&);

}  // namespace echelon
