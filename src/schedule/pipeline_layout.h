// Which layers each pipeline stage has, and which stages and parameters each pipeline rank holds: what the
// trainer and the predictions must agree on.
#pragma once

#include <map>
#include <vector>

#include "schedule/stage_flops.h"
#include "schedule/step_programs.h"
#include "spec/plan.h"

namespace echelon {

// Whether all microbatches of a step see the same weights: every schedule but PipeDream and 2BW.
bool flushes(const Plan& plan);

class PipelineLayout {
 public:
  // RequestError when the plan's schedule, stages and layers do not go together.
  explicit PipelineLayout(const Plan& plan);

  const std::vector<StageSlice>& slices() const { return slices_; }
  // Stages that a pipeline rank holds, ascending.
  const std::vector<int>& stages_of(int pp_rank) const { return held_[static_cast<std::size_t>(pp_rank)]; }
  // Parameters of a pipeline rank in layer groups: for each of its stages the embedding, each block, the
  // head, where it has them. A tied output matrix is part of the head's group where the rank does not hold
  // the embedding as well.
  const std::vector<std::vector<ParamSpec>>& groups_of(int pp_rank) const {
    return groups_[static_cast<std::size_t>(pp_rank)];
  }
  // Pipeline ranks that hold a parameter, ascending: more than one for a tied embedding whose ends are on two
  // ranks, and for every stage of DualPipe. The first one counts and saves it.
  const std::vector<int>& holders_of(const std::string& parameter) const;
  // What the pipeline of a data-parallel rank runs.
  const StepPrograms& programs(int dp_rank) const { return programs_.at(microbatches_of(dp_rank)); }
  // Whether embedding and tied output layer are on one rank, so that their gradients meet there.
  bool ties_on(int pp_rank) const;

 private:
  int microbatches_of(int dp_rank) const;
  void hold(const Plan& plan, const Schedule& schedule);

  std::int64_t micro_batch_ = 1;
  std::vector<std::int64_t> samples_;     // of each data-parallel rank
  std::map<int, StepPrograms> programs_;  // by number of microbatches: at most two
  bool tied_ = false;
  std::vector<StageSlice> slices_;
  std::vector<std::vector<int>> held_;
  std::vector<std::vector<std::vector<ParamSpec>>> groups_;
  std::map<std::string, std::vector<int>> holders_;
};

}  // namespace echelon
