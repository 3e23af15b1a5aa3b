// How attention on a CPU accesses its operands: the rows of a head, and which keys each query sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "tensor/kernels.h"

namespace echelon {

// One head of one sequence: rows are `stride` elements apart. T: float or bf16, possibly const.
template <class T>
struct Head {
  T* data = nullptr;
  std::int64_t stride = 0;
  T* row(std::int64_t i) const { return data + i * stride; }
  Head from(std::int64_t i) const { return {row(i), stride}; }
};

template <class T>
Head<T> head_of(const Tensor& x, std::int64_t first_row, std::int64_t head, std::int64_t head_dim) {
  return {x.host<std::remove_const_t<T>>() + first_row * x.row_stride() + head * head_dim, x.row_stride()};
}

template <class T>
Head<T> query_head(const Tensor& x, const AttentionShape& s, std::int64_t sequence, std::int64_t head) {
  return head_of<T>(x, sequence * s.q_len, head, s.head_dim);
}

template <class T>
Head<T> key_head(const Tensor& x, const AttentionShape& s, std::int64_t sequence, std::int64_t kv_head) {
  return head_of<T>(x, sequence * (s.kv_batch_stride > 0 ? s.kv_batch_stride : s.kv_len), kv_head,
                    s.head_dim);
}

struct WantedGradients {
  bool queries, keys;
};

// A key/value head's gradients are sums over its query heads, which one thread adds in order. If there are
// too few heads for all threads, keys and queries become separate tasks, with the same order of sums: then
// two products, of the scores and of their gradients, are computed twice.
inline bool are_better_apart(std::int64_t heads, int threads, WantedGradients wanted) {
  const int of_keys = wanted.keys ? 2 : 0, of_queries = wanted.queries ? 1 : 0,
            together = 2 + of_keys + of_queries,
            apart = (wanted.keys ? 2 + of_keys : 0) + (wanted.queries ? 2 + of_queries : 0);
  const std::int64_t turns = (heads + threads - 1) / threads;
  return apart * heads < together * turns * threads;
}

// Which keys each query of one sequence sees.
class Mask {
 public:
  Mask(const AttentionShape& s, std::int64_t sequence)
      : position_(s.q_offset),
        q_step_(s.q_step),
        k_step_(s.k_step),
        kv_len_(s.kv_len),
        first_(s.first_keys.defined() ? s.first_keys.host<std::int32_t>() + sequence * s.q_len : nullptr) {}

  // Query t sees keys [first_key(t), end_key(t)); none if that is empty.
  std::int64_t first_key(std::int64_t t) const { return first_ == nullptr ? 0 : first_[t]; }
  std::int64_t end_key(std::int64_t t) const {
    return causal_keys(position_ + t * q_step_, k_step_, kv_len_);
  }
  // The first key that any of queries [begin, end) sees.
  std::int64_t first_key(std::int64_t begin, std::int64_t end) const {
    return first_ == nullptr ? 0 : *std::min_element(first_ + begin, first_ + end);
  }

  bool begins_late() const { return first_ != nullptr; }

  // Runs a pass over query t's scores of keys [first, first + cols): calls pass(begin, visible, n) for the
  // rest of the row from `begin` on, which is vector-aligned. Afterwards `made`, the pass's outputs, are zero
  // before the first visible key.
  template <class T, class Pass>
  void on_visible(std::int64_t t, std::int64_t first, std::int64_t cols, float* row,
                  std::initializer_list<T*> made, const Pass& pass) const {
    const std::int64_t end = std::clamp<std::int64_t>(end_key(t) - first, 0, cols);
    const std::int64_t hidden = std::clamp<std::int64_t>(first_key(t) - first, 0, end);
    constexpr std::int64_t vector = 64;  // at least the widest one's elements
    const std::int64_t skipped = hidden == end ? end / vector * vector : hidden / vector * vector;
    std::fill(row + skipped, row + hidden, unseen);
    pass(skipped, hidden == end ? 0 : end - skipped, cols - skipped);
    for (T* x : made) std::fill_n(x, hidden, T{});
  }

 private:
  static constexpr float unseen = -std::numeric_limits<float>::infinity();  // above no score that is seen
  std::int64_t position_, q_step_, k_step_, kv_len_;  // of the first query, and AttentionShape's
  const std::int32_t* first_;
};

}  // namespace echelon
