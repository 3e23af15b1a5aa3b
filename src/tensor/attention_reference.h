// Causal attention in plain loops: the part of the reference kernels that is more than a line of arithmetic.
#pragma once

#include "tensor/kernels.h"

namespace echelon {

// As Kernels::attention and Kernels::attention_backward, of tensors stored as T = float, double or bf16. A
// query that sees no key (q_offset negative, as for a block of keys that lies later in the sequence) gives 0
// and lse = -infinity.
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
