#include "layer/attention.h"

#include <cmath>

namespace echelon {

AttentionShape Attention::shape(std::int64_t batch, std::int64_t q_len, std::int64_t kv_len) const {
  AttentionShape s;
  s.batch = batch;
  s.q_len = q_len;
  s.kv_len = kv_len;
  s.num_heads = num_heads_;
  s.num_kv_heads = num_kv_heads_;
  s.head_dim = head_dim_;
  s.scale = 1.0 / std::sqrt(static_cast<double>(head_dim_));
  return s;
}

// q and k lie side by side, so one pass turns both.
void Attention::rotate(Kernels& kernels, const Tensor& positions, const Tensor& qkv) const {
  if (rope_theta_ > 0)
    kernels.rope(qkv.column_range(0, width() + kv_width()), head_dim_, positions, rope_theta_, false);
}

void Attention::rotate_back(Kernels& kernels, const Tensor& positions, const Tensor& dqkv) const {
  if (rope_theta_ > 0)
    kernels.rope(dqkv.column_range(0, width() + kv_width()), head_dim_, positions, rope_theta_, true);
}

static AttentionShape of_whole_sequences(const Attention& attention, std::int64_t batch, const Tensor& qkv,
                                         const Tensor& first_keys) {
  const std::int64_t seq_len = batch == 0 ? 0 : qkv.rows() / batch;
  AttentionShape shape = attention.shape(batch, seq_len, seq_len);
  shape.first_keys = first_keys;
  return shape;
}

void Attention::forward(Kernels& kernels, std::int64_t batch, const Tensor& qkv, const Tensor& first_keys,
                        const Tensor& out, const Tensor& lse) const {
  kernels.attention(q(qkv), k(qkv), v(qkv), of_whole_sequences(*this, batch, qkv, first_keys), out, lse);
}

void Attention::backward(Kernels& kernels, std::int64_t batch, const Tensor& qkv, const Tensor& first_keys,
                         const Tensor& dout, const Tensor& lse, const Tensor& delta,
                         const Tensor& dqkv) const {
  kernels.attention_backward(q(qkv), k(qkv), v(qkv), dout, lse, delta,
                             of_whole_sequences(*this, batch, qkv, first_keys), q(dqkv), k(dqkv), v(dqkv));
}

void Attention::forward_cached(Kernels& kernels, std::int64_t position, const Tensor& qkv,
                               const Tensor& cache, const Tensor& out, const Tensor& lse) const {
  const std::int64_t new_tokens = qkv.rows(), end = position + new_tokens;
  kernels.copy(kv(qkv), cache.row_range(position, end));
  AttentionShape s = shape(1, new_tokens, end);
  s.q_offset = position;
  const Tensor seen = cache.row_range(0, end);
  kernels.attention(q(qkv), seen.column_range(0, kv_width()), seen.column_range(kv_width(), 2 * kv_width()),
                    s, out, lse);
}

}  // namespace echelon
