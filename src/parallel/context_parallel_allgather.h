// Context parallelism by gathering (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2): queries stay,
// every rank gathers the keys and values of all R ranks, and their gradients are reduce-scattered. It is
// simple, but no communication hides behind computation, and every rank holds the keys and values of the
// whole sequence while a layer computes. Bytes sent by a rank, with b the bytes of its keys (or values):
// forward x 2b, backward x 4b, as in the ring.
#pragma once

#include "parallel/context_blocks.h"

namespace echelon {

// Takes over kv, this rank's own. Writes out and lse.
void gathered_attention_forward(const ContextBlocks& blocks, Communicator& group, const Tensor& q, Tensor kv,
                                const Tensor& out, const Tensor& lse);
// Writes dq and dkv, the gradient of this rank's own kv.
void gathered_attention_backward(const ContextBlocks& blocks, Communicator& group, const Tensor& q, Tensor kv,
                                 const Tensor& dout, const Tensor& lse, const Tensor& delta, const Tensor& dq,
                                 const Tensor& dkv);

}  // namespace echelon
