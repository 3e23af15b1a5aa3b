// What the instructions of a stage compute: the common measure of everything that weighs stages against each
// other (the step's predicted time, the balance of layers, the search for a schedule).
#pragma once

#include <vector>

#include "schedule/simulate.h"
#include "spec/plan.h"

namespace echelon {

// Consecutive layers of the model; the first stage has the embedding too, the last one final norm and output
// layer.
struct StageSlice {
  Range layers;
  bool embedding = false, head = false;
  Recompute recompute{};           // of the ranks that run it
  bool vocabulary_is_cut = false;  // so that the head is the final norm alone
  std::int64_t idle =
      0;  // of its parts, the embedding or a layer, the first ones: they have no backward pass
};

// FLOPs of F, B and W on one tp rank for a full microbatch: the matrix products, and what is computed again.
// The output layer runs forward and backward in the backward instruction. The embedding's lookup has none.
StageTimes stage_flops(const Plan& plan, const StageSlice& slice);
// Of one part of the output layer, where it is cut over the pipeline: V, and VW.
StageTimes vocabulary_part_flops(const Plan& plan);
// All of these for times, and messages that take none.
SimulationCosts flops_of(const Plan& plan, const std::vector<StageSlice>& slices);

}  // namespace echelon
