// Attention in bf16 by kernels that make columns of tiles (tensor/matmul_simd.h): 32 queries are the columns
// of a tile and keys its rows, so that scores, their softmax and their gradients lie as the next products
// take them, and only what is given is packed, once for a head. The algorithm is FlashAttention-2's (Dao
// 2023, https://arxiv.org/abs/2307.08691).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/kernels.h"
#include "tensor/thread_team.h"

namespace echelon {

struct MicroKernel;

// Whether all that is packed of a head has room in so many bytes; and the shape is one of these: no cap, and
// nothing that is accumulated onto.
bool is_made_by_columns(const AttentionShape& shape, std::size_t room);

// As attention_forward() and attention_backward(), in bf16; thread i's room begins i * room_step bytes behind
// `rooms`. dq, or dk and dv, may be undefined.
void attention_forward_by_columns(const MicroKernel& kernel, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const AttentionShape& shape, const Tensor& out,
                                  const Tensor& lse, std::byte* rooms, std::int64_t room_step,
                                  const ThreadTeam& team);
void attention_backward_by_columns(const MicroKernel& kernel, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const Tensor& dout, const Tensor& lse,
                                   const Tensor& delta, const AttentionShape& shape, const Tensor& dq,
                                   const Tensor& dk, const Tensor& dv, std::byte* rooms,
                                   std::int64_t room_step, const ThreadTeam& team);

}  // namespace echelon
