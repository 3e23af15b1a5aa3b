// From what the passes of a rank have added up to the gradients of the whole mesh: the parts of ranks that
// hold the same parameter, the sum over data-parallel ranks (compressed where that is asked for, onto the
// shards of ZeRO where state is cut), and whether the result is finite.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/parameters.h"

namespace echelon {

class GradientCompletion {
 public:
  // `rank` and `parameters` outlive it.
  GradientCompletion(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline,
                     const ParameterStore& parameters, const Faults& faults);

  // An update begins, with so many before it: gradients are zero. Without `reduces` each data-parallel rank's
  // stay its own.
  void begin(std::int64_t updates, bool reduces = true);
  bool begun() const { return reduction_.has_value(); }
  // A layer group has the gradients of all microbatches of the update: its sums begin.
  void group_done(int group);
  // All groups have: what is left of their sums. The pipeline may be full.
  void finish();
  // The same where the pipeline is empty: parts that two pipeline ranks have of a parameter come together.
  void finish_with_pipeline();

  // All ranks agree on the first tensor, so that whichever is heard names the same one.
  std::string first_nonfinite(double loss) const;
  // What compression carries from step to step.
  std::vector<CarriedTensor> carried() const { return reducer_.carried(); }

 private:
  void finish_group(int group);
  void finish_sums();
  void sum_ties_first();
  // `apart`: the gradients of a tied table are still two.
  void add_pipeline_copies(bool apart);
  void add_theirs(const Tensor& gradient, int other);

  const Rank& rank_;
  const ParameterStore& parameters_;
  const bool shards_sequence_;
  const Faults faults_;
  GradientReducer reducer_;
  const std::set<int> late_groups_;  // with a parameter that is complete only when the pipeline is empty
  const bool has_stage_copies_;      // on two pipeline ranks
  std::optional<DataParallel> reduction_;  // of the update that is being added up
};

}  // namespace echelon
