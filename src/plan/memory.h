// Bytes that a rank will hold, by category, before anything runs. The measured twin is Arena::peak().
#pragma once

#include <cstdint>

#include "schedule/pipeline_layout.h"
#include "spec/memory.h"

namespace echelon {

// Bytes that training keeps for each parameter.
struct StateBytes {
  std::int64_t value = 0, gradient = 0, optimizer = 0;
};
// In a run: values, gradients and two moments in its dtype; what is offloaded counts nothing.
StateBytes state_bytes(const Plan& plan);
inline constexpr StateBytes mixed_precision_adam{2, 2,
                                                 12};  // f16, f16; f32 values and moments (ZeRO, section 3)

// What a rank keeps from step to step, of `whole` parameters of which `own` are its shard, under a stage of
// ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, figure 1).
Memory kept_state(std::int64_t whole, std::int64_t own, int zero, const StateBytes& bytes);

// Peak of one training step of the rank with these coordinates: parameters, gradients and optimizer state
// from the parameters' own declarations; activations by walking the layers' allocations in their order. Equal
// to the byte to what the trainer's arena measures, under memory_assumptions(). The kernels' scratch
// (category other) is the device's own and comes on top. Where a step goes on into the next one: of so many
// steps, from an empty pipeline to an empty one.
inline constexpr std::int64_t many_steps = std::int64_t{1} << 40;
Memory predict_memory(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at = {},
                      std::int64_t steps = many_steps);

}  // namespace echelon
