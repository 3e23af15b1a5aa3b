// Attention in f32 or bf16, or in f32 by parts (tensor/three_parts.h), with kernels that compute columns of
// tiles (tensor/matmul_simd.h): 32 queries are the columns of a tile and keys its rows. Scores, their softmax
// and their gradients then already have the layout that the next products need, and only the inputs are
// packed, once per head. The algorithm is FlashAttention-2's (Dao 2023, https://arxiv.org/abs/2307.08691).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/kernels.h"
#include "tensor/thread_team.h"

namespace echelon {

struct MicroKernel;
template <class T>
struct ScorePasses;

// What computes columns of tiles of T, and what computes from them.
template <class T>
struct ColumnKernels {
  const MicroKernel* products;
  const ScorePasses<T>* scores;
};

// Whether a head's packed data fit in `room` bytes, and the shape is supported: no cap, a positive scale.
template <class T>
bool is_made_by_columns(const AttentionShape& shape, bool backward, std::int64_t room);

// Like attention_forward() and attention_backward(), in T: float, bf16 or ThreeParts. Thread i's work space
// begins i * room_step bytes after `rooms`. dq, or dk and dv, may be undefined.
template <class T>
void attention_forward_by_columns(const ColumnKernels<T>& kernels, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const AttentionShape& shape, const Tensor& out,
                                  const Tensor& lse, std::byte* rooms, std::int64_t room_step,
                                  const ThreadTeam& team);
template <class T>
void attention_backward_by_columns(const ColumnKernels<T>& kernels, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const Tensor& dout, const Tensor& lse,
                                   const Tensor& delta, const AttentionShape& shape, const Tensor& dq,
                                   const Tensor& dk, const Tensor& dv, std::byte* rooms,
                                   std::int64_t room_step, const ThreadTeam& team);

}  // namespace echelon
