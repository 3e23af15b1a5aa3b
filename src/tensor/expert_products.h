// Products of tokens that are sorted by expert, for all experts in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/fp8.h"
#include "tensor/kernels.h"
#include "tensor/sequence_sums.h"
#include "tensor/weight.h"

namespace echelon {

// Rows [bounds[e], bounds[e + 1]) belong to expert e, and may be none; rows after the last bound are neither
// read nor written.
using ExpertBounds = std::vector<std::int64_t>;

bool any_trained(const std::vector<Weight>& weights);
// y = x W or x W^T. `sums`: the blocks of each sum. In fp8, each expert's operands have their own scales.
void multiply(Kernels& kernels, const std::vector<Weight>& weights, Transpose turn,
              const ExpertBounds& bounds, const Tensor& x, const Tensor& y, const SumBlocks& sums = {},
              const OperandFormats& formats = {});
// Gradients += dy^T x. Unchanged for experts without tokens; frozen experts have none.
void add_gradients(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                   const Tensor& x, const Tensor& dy, const OperandFormats& formats = {});
// Adds biases of experts' products, with as many columns as y: to each row its expert's.
void add_biases(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                const Tensor& y);
// Gradients += column sums of dy, likewise.
void add_bias_gradients(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                        const Tensor& dy);
// of_rows (N, 1, wide) += each row of x times its expert's bias.
void add_bias_products(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                       const Tensor& x, const Tensor& of_rows);
// Gradients sequence by sequence. `of_sequences`: bounds of each expert's rows of each sequence, expert by
// expert. Here an expert without tokens of a sequence contributes a gradient of zero.
void add_gradients(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& weights,
                   const ExpertBounds& of_sequences, const Tensor& x, const Tensor& dy);
void add_bias_gradients(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& biases,
                        const ExpertBounds& of_sequences, const Tensor& dy);

}  // namespace echelon
