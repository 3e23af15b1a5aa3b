// Causal attention in tiles (FlashAttention-2: Dao 2023, https://arxiv.org/abs/2307.08691): one tile of
// scores at a time, never a T x T matrix. f32 products are oneDNN's where it is used (tensor/matmul.h), or
// under invariant numerics those of our own kernels; softmax is in fused passes. f32, or bf16 with scores and
// sums in f32; the latter by columns of tiles (tensor/attention_columns.h) if a kernel computes them.
#pragma once

#include <cstdint>

#include "tensor/kernels.h"
#include "tensor/thread_team.h"

namespace echelon {

// Scratch bytes for each thread, its products included.
std::int64_t attention_scratch_bytes(DType dtype);
// The limit in bf16, given by the scratch.
inline constexpr std::int64_t most_head_dim = 4096;

// Like Kernels::attention and Kernels::attention_backward, with shapes already checked. `scratch` holds
// attention_scratch_bytes() for each thread. Forward, threads share blocks of queries; backward, the batch's
// key/value heads or, if these are few, their tiles of keys and blocks of queries. The bits do not depend on
// the team.
void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                       const Tensor& out, const Tensor& lse, const Tensor& scratch, const ThreadTeam& team,
                       Numerics numerics);
void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                        const Tensor& lse, const Tensor& delta, const AttentionShape& shape, const Tensor& dq,
                        const Tensor& dk, const Tensor& dv, const Tensor& scratch, const ThreadTeam& team,
                        Numerics numerics);

}  // namespace echelon
