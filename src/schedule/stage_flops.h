// FLOPs of a stage's instructions: the common measure by which stages are compared (predicted step time,
// balance of layers, search for a schedule).
#pragma once

#include <vector>

#include "schedule/simulate.h"
#include "spec/plan.h"

namespace echelon {

// Consecutive layers of the model. The first stage has the embedding too, the last one the final norm and the
// output layer.
struct StageSlice {
  Range layers;
  bool embedding = false, head = false;
  Recompute recompute{};           // of the ranks that run it
  bool vocabulary_is_cut = false;  // the head is then only the final norm
  // How many of its first parts (embedding, layers) have no backward pass.
  std::int64_t idle = 0;
};

// FLOPs of F, B and W on one tp rank for a full microbatch: matrix products and recomputation. The output
// layer runs forward and backward in the backward instruction. Embedding lookups count nothing.
StageTimes stage_flops(const Plan& plan, const StageSlice& slice);
// Of one part of the output layer under vocabulary parallelism: V and VW.
StageTimes vocabulary_part_flops(const Plan& plan);
// All of these as times, with messages that take none.
SimulationCosts flops_of(const Plan& plan, const std::vector<StageSlice>& slices);

}  // namespace echelon
