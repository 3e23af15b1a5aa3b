// Bytes that a rank will hold, by category, before anything runs. The measured twin is Arena::peak().
#pragma once

#include "spec/memory.h"
#include "spec/plan.h"

namespace echelon {

// Peak of one training step of the rank with these coordinates: parameters, gradients and optimizer state
// from the parameters' own declarations; activations by walking the layers' allocations in their order. Equal
// to the byte to what the trainer's arena measures. The kernels' scratch (category other) is the device's own
// and comes on top.
Memory predict_memory(const Plan& plan, int dp_rank, int tp_rank, int pp_rank = 0);

// Elements of the parameters that a rank holds.
std::int64_t local_parameters(const Plan& plan, int tp_rank, int pp_rank = 0);

}  // namespace echelon
