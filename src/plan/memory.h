// Bytes that a rank will hold, by category, before anything runs. The measured twin is Arena::peak().
#pragma once

#include <cstdint>

#include "schedule/pipeline_layout.h"
#include "spec/memory.h"

namespace echelon {

// Peak of one training step of the rank with these coordinates: parameters, gradients and optimizer state
// from the parameters' own declarations; activations by walking the layers' allocations in their order. Equal
// to the byte to what the trainer's arena measures. The kernels' scratch (category other) is the device's own
// and comes on top. Where the schedule does not flush: of a stream that is long enough for its steady state.
Memory predict_memory(const Plan& plan, const PipelineLayout& pipeline, int dp_rank, int tp_rank,
                      int pp_rank = 0);

}  // namespace echelon
