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
void Attention::rotate(Kernels& kernels, const Tensor& qkv, std::int64_t seq_len, std::int64_t first,
                       bool inverse) const {
  if (rope_theta_ > 0)
    kernels.rope(qkv.column_range(0, width() + kv_width()), head_dim_, seq_len, first, rope_theta_, inverse);
}

void Attention::forward(Kernels& kernels, std::int64_t batch, std::int64_t seq_len, const Tensor& qkv,
                        const Tensor& out, const Tensor& lse) const {
  rotate(kernels, qkv, seq_len, 0, false);
  forward_again(kernels, batch, seq_len, qkv, out, lse);
}

void Attention::forward_again(Kernels& kernels, std::int64_t batch, std::int64_t seq_len, const Tensor& qkv,
                              const Tensor& out, const Tensor& lse) const {
  kernels.attention(q(qkv), k(qkv), v(qkv), shape(batch, seq_len, seq_len), out, lse);
}

void Attention::backward(Kernels& kernels, std::int64_t batch, std::int64_t seq_len, const Tensor& qkv,
                         const Tensor& out, const Tensor& dout, const Tensor& lse, const Tensor& dqkv) const {
  kernels.attention_backward(q(qkv), k(qkv), v(qkv), out, dout, lse, shape(batch, seq_len, seq_len), q(dqkv),
                             k(dqkv), v(dqkv));
  rotate(kernels, dqkv, seq_len, 0, true);
}

void Attention::forward_cached(Kernels& kernels, std::int64_t position, const Tensor& qkv,
                               const Tensor& cache, const Tensor& out, const Tensor& lse) const {
  const std::int64_t new_tokens = qkv.rows(), end = position + new_tokens;
  rotate(kernels, qkv, new_tokens, position, false);
  kernels.copy(qkv.column_range(width(), qkv_width()), cache.row_range(position, end));
  AttentionShape s = shape(1, new_tokens, end);
  s.q_offset = position;
  const Tensor seen = cache.row_range(0, end);
  kernels.attention(q(qkv), seen.column_range(0, kv_width()), seen.column_range(kv_width(), 2 * kv_width()),
                    s, out, lse);
}

}  // namespace echelon
