// Ring Attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): queries stay; blocks of keys and values
// travel around a ring of R ranks, and the next block is in flight while the current one is computed. Partial
// outputs are merged by their log-sum-exp. In the backward pass the blocks travel again. The gradient of a
// block follows one step behind it and accumulates each rank's part; the last rank sends it home.
//
// Bytes sent by a rank, with b the bytes of its keys (or values): forward x 2b, backward x 4b.
// Only key/value heads travel, however many query heads share one.
#pragma once

#include "parallel/context_blocks.h"

namespace echelon {

// Takes over kv, this rank's own. Writes out and lse.
void ring_attention_forward(const ContextBlocks& blocks, Communicator& ring, const Tensor& q, Tensor kv,
                            const Tensor& out, const Tensor& lse);
// Writes dq and dkv, the gradient of this rank's own kv.
void ring_attention_backward(const ContextBlocks& blocks, Communicator& ring, const Tensor& q, Tensor kv,
                             const Tensor& dout, const Tensor& lse, const Tensor& delta, const Tensor& dq,
                             const Tensor& dkv);

}  // namespace echelon
