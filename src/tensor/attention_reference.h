// Causal attention in plain loops, for the reference kernels.
#pragma once

#include "tensor/kernels.h"

namespace echelon {

// Like Kernels::attention and Kernels::attention_backward, for tensors of T = float, double or bf16. A query
// that sees no key (negative q_offset, as for a block of later keys) gives 0 and lse = -infinity.
template <class T>
void reference_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                         const Tensor& out, const Tensor& lse);

template <class T>
void reference_attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                               const Tensor& delta);
template <class T>
void reference_attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                                  const Tensor& lse, const Tensor& delta, const AttentionShape& shape,
                                  const Tensor& dq, const Tensor& dk, const Tensor& dv);

}  // namespace echelon
