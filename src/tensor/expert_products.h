// Products of tokens that are sorted by expert: those of all experts are one call.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/fp8.h"
#include "tensor/kernels.h"
#include "tensor/sequence_sums.h"
#include "tensor/weight.h"

namespace echelon {

// Rows [bounds[e], bounds[e + 1]) belong to expert e, which may have none; rows after the last bound are
// neither read nor written.
using ExpertBounds = std::vector<std::int64_t>;

bool any_trained(const std::vector<Weight>& weights);
// y = x W or x W^T. `sums`: how each is grouped. In fp8 the operands of each expert have scales of their own.
void multiply(Kernels& kernels, const std::vector<Weight>& weights, Transpose turn,
              const ExpertBounds& bounds, const Tensor& x, const Tensor& y, const SumBlocks& sums = {},
              const OperandFormats& formats = {});
// Gradients += dy^T x. Those of an expert without tokens stay as they are, and a frozen one has none.
void add_gradients(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                   const Tensor& x, const Tensor& dy, const OperandFormats& formats = {});
// Biases of experts' products, of as many columns as y has: each row gets its expert's.
void add_biases(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                const Tensor& y);
// Gradients += column sums of dy; as above.
void add_bias_gradients(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                        const Tensor& dy);
// of_rows (N, 1, wide) += each row of x times its expert's bias.
void add_bias_products(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                       const Tensor& x, const Tensor& of_rows);
// Gradients sequence by sequence, where `of_sequences` has the bounds of each expert's rows of each of them,
// one expert after another: here an expert without tokens of a sequence has a gradient of it, which is zero.
void add_gradients(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& weights,
                   const ExpertBounds& of_sequences, const Tensor& x, const Tensor& dy);
void add_bias_gradients(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& biases,
                        const ExpertBounds& of_sequences, const Tensor& dy);

}  // namespace echelon
