// Tensors of weights that are split (base/split_weight.h), on the host.
#pragma once

#include <span>

#include "tensor/tensor.h"

namespace echelon {

// f32, of values (bf16) and remainders (i16), all contiguous and of one size.
void join_weights(const Tensor& values, const Tensor& remainders, std::span<float> weights);
// The values of weights, as many as there are, and the remainders of the same ones.
void split_values(std::span<const float> weights, Out values);
void split_remainders(std::span<const float> weights, Out remainders);

}  // namespace echelon
