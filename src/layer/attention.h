// Causal self-attention on the heads of one rank: from the projected (N, (H + 2 Hkv) D) matrix [q | k | v] to
// (N, H D). Grouped-query attention (Ainslie 2023) when Hkv < H; RoPE when theta > 0.
#pragma once

#include "tensor/kernels.h"

namespace echelon {

class Attention {
 public:
  Attention() = default;
  Attention(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim, double rope_theta)
      : num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_dim_(head_dim), rope_theta_(rope_theta) {}

  std::int64_t width() const { return num_heads_ * head_dim_; }
  std::int64_t qkv_width() const { return (num_heads_ + 2 * num_kv_heads_) * head_dim_; }
  std::int64_t num_heads() const { return num_heads_; }
  std::int64_t num_kv_heads() const { return num_kv_heads_; }
  std::int64_t head_dim() const { return head_dim_; }
  std::int64_t kv_width() const { return num_kv_heads_ * head_dim_; }
  // The same attention on some of the heads.
  Attention part(std::int64_t num_heads, std::int64_t num_kv_heads) const {
    return {num_heads, num_kv_heads, head_dim_, rope_theta_};
  }

  // Columns of a [q | k | v] matrix.
  Tensor q(const Tensor& qkv) const { return qkv.column_range(0, width()); }
  Tensor k(const Tensor& qkv) const { return qkv.column_range(width(), width() + kv_width()); }
  Tensor v(const Tensor& qkv) const { return qkv.column_range(width() + kv_width(), qkv_width()); }
  Tensor kv(const Tensor& qkv) const { return qkv.column_range(width(), qkv_width()); }

  // RoPE, in place, for rows that stand at `positions` (N, i32): of q and k, and of their gradients back.
  void rotate(Kernels& kernels, const Tensor& positions, const Tensor& qkv) const;
  void rotate_back(Kernels& kernels, const Tensor& positions, const Tensor& dqkv) const;

  // Whole sequences, rotated: out (N, H D), lse (B*H*T). first_keys as in AttentionShape.
  void forward(Kernels& kernels, std::int64_t batch, const Tensor& qkv, const Tensor& first_keys,
               const Tensor& out, const Tensor& lse) const;
  // dqkv is overwritten with the gradient of the rotated qkv; delta as Kernels::attention_delta gives it.
  void backward(Kernels& kernels, std::int64_t batch, const Tensor& qkv, const Tensor& first_keys,
                const Tensor& dout, const Tensor& lse, const Tensor& delta, const Tensor& dqkv) const;
  // One sequence, rotated new tokens at positions [position, position + N): their keys and values go into
  // `cache` (max positions, 2 Hkv D), and they attend to all that is there.
  void forward_cached(Kernels& kernels, std::int64_t position, const Tensor& qkv, const Tensor& cache,
                      const Tensor& out, const Tensor& lse) const;

  AttentionShape shape(std::int64_t batch, std::int64_t q_len, std::int64_t kv_len) const;

 private:
  std::int64_t num_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
  double rope_theta_ = 0;
};

}  // namespace echelon
