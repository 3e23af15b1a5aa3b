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
  std::int64_t kv_width() const { return num_kv_heads_ * head_dim_; }

  // qkv is rotated in place (and kept so for the backward pass). out (N, H D), lse (B*H*T).
  void forward(Kernels& kernels, std::int64_t batch, std::int64_t seq_len, const Tensor& qkv,
               const Tensor& out, const Tensor& lse) const;
  // The same out and lse again from what forward left in qkv.
  void forward_again(Kernels& kernels, std::int64_t batch, std::int64_t seq_len, const Tensor& qkv,
                     const Tensor& out, const Tensor& lse) const;
  // dqkv is overwritten with the gradient of the unrotated qkv.
  void backward(Kernels& kernels, std::int64_t batch, std::int64_t seq_len, const Tensor& qkv,
                const Tensor& out, const Tensor& dout, const Tensor& lse, const Tensor& dqkv) const;
  // One sequence, new tokens at positions [position, position + N): their keys and values go into `cache`
  // (max positions, 2 Hkv D), and they attend to all that is there.
  void forward_cached(Kernels& kernels, std::int64_t position, const Tensor& qkv, const Tensor& cache,
                      const Tensor& out, const Tensor& lse) const;

 private:
  Tensor q(const Tensor& qkv) const { return qkv.column_range(0, width()); }
  Tensor k(const Tensor& qkv) const { return qkv.column_range(width(), width() + kv_width()); }
  Tensor v(const Tensor& qkv) const { return qkv.column_range(width() + kv_width(), qkv_width()); }
  void rotate(Kernels& kernels, const Tensor& qkv, std::int64_t seq_len, std::int64_t first,
              bool inverse) const;
  AttentionShape shape(std::int64_t batch, std::int64_t q_len, std::int64_t kv_len) const;

  std::int64_t num_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
  double rope_theta_ = 0;
};

}  // namespace echelon
