// Pipeline parallelism (GPipe, Huang et al. 2018, https://arxiv.org/abs/1811.06965, and every schedule
// since): the executor. One loop runs the lowered instructions of one rank, whatever the schedule: what
// differs between GPipe, 1F1B, zero-bubble and DualPipe is in the list, not here. Bytes sent per rank: one
// activation and one gradient, rows_here x C elements each, per microbatch and stage boundary to another
// rank.
#pragma once

#include <chrono>
#include <vector>

#include "comm/communicator.h"
#include "schedule/timeline.h"

namespace echelon {

// What the executor asks of the stages that a rank holds. Tensors are handed over: the receiver decides when
// they go.
class PipelineStages {
 public:
  virtual ~PipelineStages() = default;
  // `input` is undefined for stage 0; the result is undefined for the last stage.
  virtual Tensor forward(int stage, int microbatch, Tensor input) = 0;
  // `gradient` of the stage's output is undefined for the last stage; the result, of its input, for stage 0.
  virtual Tensor backward(int stage, int microbatch, Tensor gradient) = 0;
  virtual Tensor backward_input(int stage, int microbatch, Tensor gradient) = 0;
  virtual void backward_weight(int stage, int microbatch) = 0;
  // Room for an activation, or its gradient, of this microbatch at a stage boundary.
  virtual Tensor make_boundary(int microbatch) = 0;
};

struct PipelineRun {
  std::chrono::steady_clock::time_point start;
  std::vector<Span> spans;  // seconds since the run's beginning
  int peak_saved = 0;  // most microbatches of a stage that were kept at once, summed over the rank's stages
  std::int64_t messages = 0;  // sent
};

// Runs `program`, the rank's list of a lowered schedule, in order. `group` is the pp group. Throws what
// stages and group throw.
PipelineRun run_pipeline(Communicator& group, const Schedule& lowered, PipelineStages& stages);

}  // namespace echelon
