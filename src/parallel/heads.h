// The attention heads of one rank, and where they lie in a projected matrix [q | k | v] (N, (H + 2 Hkv) D).
// Grouped-query attention (Ainslie 2023) if Hkv < H.
#pragma once

#include <algorithm>
#include <cmath>

#include "spec/model_spec.h"
#include "tensor/kernels.h"

namespace echelon {

class Heads {
 public:
  Heads() = default;
  // `scale`, `cap` and `alibi` apply to q.k before the softmax (AttentionShape).
  Heads(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim, double scale,
        double cap = 0, const Alibi& alibi = {})
      : num_heads_(num_heads),
        num_kv_heads_(num_kv_heads),
        head_dim_(head_dim),
        scale_(scale),
        cap_(cap),
        alibi_(alibi) {}
  // All of a model.
  explicit Heads(const ModelSpec& m)
      : Heads(m.num_heads, m.num_kv_heads, m.head_dim,
              m.scales.attention != 0 ? m.scales.attention : 1.0 / std::sqrt(static_cast<double>(m.head_dim)),
              m.caps.attention, {.heads = m.alibi ? m.num_heads : 0}) {}
  Heads(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim)
      : Heads(num_heads, num_kv_heads, head_dim, 1.0 / std::sqrt(static_cast<double>(head_dim))) {}

  // The heads of part `index` of `parts`.
  Heads part(int index, int parts) const {
    Heads part = *this;
    part.num_heads_ = num_heads_ / parts;
    part.num_kv_heads_ = std::max<std::int64_t>(num_kv_heads_ / parts, 1);
    part.alibi_.first_head += index * part.num_heads_;
    return part;
  }

  std::int64_t width() const { return num_heads_ * head_dim_; }
  std::int64_t qkv_width() const { return (num_heads_ + 2 * num_kv_heads_) * head_dim_; }
  std::int64_t num_heads() const { return num_heads_; }
  std::int64_t num_kv_heads() const { return num_kv_heads_; }
  std::int64_t head_dim() const { return head_dim_; }
  std::int64_t kv_width() const { return num_kv_heads_ * head_dim_; }

  // Column ranges of a [q | k | v] matrix.
  Tensor q(const Tensor& qkv) const { return qkv.column_range(0, width()); }
  Tensor k(const Tensor& qkv) const { return qkv.column_range(width(), width() + kv_width()); }
  Tensor v(const Tensor& qkv) const { return qkv.column_range(width() + kv_width(), qkv_width()); }
  Tensor qk(const Tensor& qkv) const { return qkv.column_range(0, width() + kv_width()); }
  Tensor kv(const Tensor& qkv) const { return qkv.column_range(width(), qkv_width()); }

  AttentionShape shape(std::int64_t batch, std::int64_t q_len, std::int64_t kv_len) const {
    AttentionShape s;
    s.batch = batch;
    s.q_len = q_len;
    s.kv_len = kv_len;
    s.num_heads = num_heads_;
    s.num_kv_heads = num_kv_heads_;
    s.head_dim = head_dim_;
    s.scale = scale_;
    s.cap = cap_;
    s.alibi = alibi_;
    return s;
  }

 private:
  std::int64_t num_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
  double scale_ = 1, cap_ = 0;
  Alibi alibi_;
};

}  // namespace echelon
