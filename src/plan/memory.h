// Bytes that a rank holds until a step ends, by category.
#pragma once

#include <cstdint>
#include <functional>

#include "schedule/pipeline_layout.h"
#include "spec/memory.h"

namespace echelon {

// Bytes that training holds for each parameter.
struct StateBytes {
  std::int64_t value = 0, gradient = 0, optimizer = 0;
};
// In a run: value, gradient and two moments in the plan's dtypes; offloaded ones count 0.
StateBytes state_bytes(const Plan& plan);
inline constexpr StateBytes mixed_precision_adam{2, 2,
                                                 12};  // f16, f16; f32 values and moments (ZeRO, section 3)

// Bytes that a rank holds until a step ends: of `whole` parameters, of which `own` are its shard, under a
// stage of ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, figure 1).
Memory kept_state(std::int64_t whole, std::int64_t own, int zero, const StateBytes& bytes);

// A rank's peak memory in one training step of this repository's trainer, and what its activations do on the
// host. train/dry_run.h computes it, in a layer above the planner.
struct StepMemory : Memory {
  StepMemory(const Memory& peak = {},
             const HostActivations& offloaded = {})  // NOLINT(google-explicit-constructor)
      : Memory(peak), host(offloaded) {}
  HostActivations host;
};
using ExactMemory =
    std::function<StepMemory(const Plan&, const PipelineLayout&, const Coordinates&, Device computes)>;

}  // namespace echelon
