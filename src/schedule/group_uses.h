#pragma once

#include <vector>

#include "schedule/pipeline_layout.h"

namespace echelon {

// Layer groups of a stage among those of a pipeline rank: [first, end) in the forward pass, of which those
// from `block` on have a backward pass that reads values. `output` has the output layer's matrix, where the
// stage has that layer; else -1.
struct StageGroups {
  int first = 0, block = 0, end = 0, output = -1;
};
StageGroups stage_groups(const PipelineLayout& pipeline, int pp_rank, int stage);

// Layer groups whose values a rank's program reads, in order. A stage's forward pass goes from its first
// group to its last, its backward pass the other way. The output layer is read in the backward pass alone.
// A part of it is read in V. Weight gradients (W, VW) read no values, nor does the embedding's backward pass where no
// norm is behind it.
std::vector<int> group_uses(const PipelineLayout& pipeline, const StepPrograms::Program& program,
                            int pp_rank);

}  // namespace echelon
