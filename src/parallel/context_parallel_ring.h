// RingAttention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): queries stay where they are; blocks of
// keys and values travel a ring of R ranks, and the next block is under way while the present one is
// computed. Partial outputs are merged by their log-sum-exp. Backward, a block travels again, and the
// gradient of its keys and values follows one step behind it, gathering each rank's part; the last rank sends
// it home.
//
// Bytes sent by a rank, with b the bytes of its keys (or values): forward x 2b, backward x 4b.
// Only key/value heads travel, however many query heads share one.
#pragma once

#include "parallel/context_blocks.h"

namespace echelon {

// kv: this rank's own, handed over. out and lse are written.
void ring_attention_forward(const ContextBlocks& blocks, Communicator& ring, const Tensor& q, Tensor kv,
                            const Tensor& out, const Tensor& lse);
// dq and the gradient of this rank's own kv are written.
void ring_attention_backward(const ContextBlocks& blocks, Communicator& ring, const Tensor& q, Tensor kv,
                             const Tensor& dout, const Tensor& lse, const Tensor& delta, const Tensor& dq,
                             const Tensor& dkv);

}  // namespace echelon
