// Runs a rank's program on paper and counts what it holds: the twin of PipelineExecutor and TrainingStages.
#pragma once

#include <span>
#include <vector>

#include "plan/layer_walk.h"
#include "plan/zero_walk.h"
#include "schedule/group_uses.h"
#include "schedule/pipeline_layout.h"

namespace echelon {

// The summed loss of a microbatch, and of a step.
inline constexpr std::int64_t loss_bytes = 8;

class StepWalk {
 public:
  // All outlive this.
  StepWalk(const Plan& plan, const PipelineLayout& pipeline, int pp_rank, Account& account, ZeroWalk& zero)
      : pipeline_(pipeline),
        pp_rank_(pp_rank),
        interleaves_pairs_(interleaves_pairs(plan)),
        model_(&plan.model),
        a_(account),
        zero_(zero),
        layer_(plan, account) {}

  // One program after another. `sizes` of each microbatch of a step; `ids` bytes of all their tokens,
  // targets and positions.
  void run(const StepPrograms::Program& program, const std::vector<MicrobatchSizes>& sizes, std::int64_t ids);
  // Where the schedule flushes, after its program: `copies` are the sizes of what arrives of gradients that
  // another pipeline rank holds as well.
  void end_step(std::int64_t ids, const std::vector<std::int64_t>& copies);

 private:
  void execute(const Instruction& i);
  void execute_together(std::span<const Instruction> list);
  void head(int stage, const StageGroups& g);

  template <class Body>
  void using_group(int group, const Body& body) {
    zero_.use(group);
    body();
    zero_.done();
  }
  template <class Body>
  void adding_gradients(int stage, int group, const Body& body) {
    zero_.need_gradients(group);
    body();
    zero_.group_done(stage, group);
  }

  const PipelineLayout& pipeline_;
  int pp_rank_;
  bool interleaves_pairs_;
  const ModelSpec* model_;
  const std::vector<MicrobatchSizes>* sizes_ = nullptr;
  std::int64_t ids_ = 0;
  int loaded_ = 0;  // steps whose tokens are there, or were
  Account& a_;
  ZeroWalk& zero_;
  LayerWalk layer_;
};

}  // namespace echelon
