// Causal attention in tiles (FlashAttention-2: Dao 2023, https://arxiv.org/abs/2307.08691): a tile of scores
// at a time, never a T x T matrix. Products by oneDNN, or under invariant numerics by our own kernels,
// softmax by fused passes. f32, or bf16 whose scores and sums are f32; that by columns of tiles
// (tensor/attention_columns.h) where a kernel makes them.
#pragma once

#include <cstdint>

#include "tensor/kernels.h"
#include "tensor/thread_team.h"

namespace echelon {

// Scratch that each thread needs, its products' too.
std::int64_t attention_scratch_bytes(DType dtype, Numerics numerics);
// In bf16: more would not fit in it.
inline constexpr std::int64_t most_head_dim = 4096;

// As Kernels::attention and Kernels::attention_backward, shapes already checked. `scratch` holds
// attention_scratch_bytes() of each thread. Forward: the threads share blocks of queries; backward: key/value
// heads of the batch, or where these are few, their tiles of keys and blocks of queries. The bits do not
// depend on the team.
void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                       const Tensor& out, const Tensor& lse, const Tensor& scratch, const ThreadTeam& team,
                       Numerics numerics);
void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                        const Tensor& lse, const Tensor& delta, const AttentionShape& shape, const Tensor& dq,
                        const Tensor& dk, const Tensor& dv, const Tensor& scratch, const ThreadTeam& team,
                        Numerics numerics);

}  // namespace echelon
