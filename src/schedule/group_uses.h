#pragma once

#include <vector>

#include "schedule/pipeline_layout.h"

namespace echelon {

// A stage's layer groups, as indices into those of its pipeline rank: the forward pass reads [first, end),
// the backward pass [block, end). `output`: the group with the output layer's matrix, if the stage has that
// layer; else -1.
struct StageGroups {
  int first = 0, block = 0, end = 0, output = -1;
};
StageGroups stage_groups(const PipelineLayout& pipeline, int pp_rank, int stage);

// The layer groups whose weights a rank's program reads, in order (for ZeRO 3). A stage's forward pass goes
// from its first group to its last, its backward pass the other way. The output layer is read only in the
// backward pass; under vocabulary parallelism its part is read in V. Weight gradients (W, VW) read no
// weights, nor does the embedding's backward pass unless a norm follows it.
std::vector<int> group_uses(const PipelineLayout& pipeline, const StepPrograms::Program& program,
                            int pp_rank);

}  // namespace echelon
