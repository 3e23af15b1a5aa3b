// Splits and joins tensors of split weights (base/split_weight.h), on the host.
#pragma once

#include <span>

#include "tensor/tensor.h"

namespace echelon {

// The f32 weights from values (bf16) and remainders (i16), all contiguous and of one size.
void join_weights(const Tensor& values, const Tensor& remainders, std::span<float> weights);
// The values, or the remainders, of weights; sizes must match.
void split_values(std::span<const float> weights, Out values);
void split_remainders(std::span<const float> weights, Out remainders);

}  // namespace echelon
