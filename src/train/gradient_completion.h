// Completes gradients: from what a rank's passes have accumulated to the gradients of the whole mesh. It adds
// the contributions of ranks that hold the same parameter, sums over data-parallel ranks (compressed if asked
// for; onto shards under ZeRO), and checks whether the result is finite.
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

  // Begins an update, after `updates` earlier ones: gradients are zero. Without `reduces`, each data-parallel
  // rank's gradients stay its own.
  void begin(std::int64_t updates, bool reduces = true);
  bool begun() const { return reduction_.has_value(); }
  // Announces that a layer group has the gradients of all microbatches of the update: its sums begin.
  void group_done(int group);
  // All groups are done: completes their sums. The pipeline may be full.
  void finish();
  // The same when the pipeline is empty: also adds the contributions of two pipeline ranks to one parameter.
  void finish_with_pipeline();

  // The first tensor that is not finite. All ranks agree on it, so that each reports the same one.
  std::string first_nonfinite(double loss) const;
  // What compression carries from step to step.
  std::vector<CarriedTensor> carried() const { return reducer_.carried(); }

 private:
  void finish_group(int group);
  void finish_sums();
  void sum_ties_first();
  // `apart`: a tied table still has two gradients.
  void add_pipeline_copies(bool apart);
  void add_theirs(const Tensor& gradient, int other);

  const Rank& rank_;
  const ParameterStore& parameters_;
  const bool shards_sequence_;
  const Faults faults_;
  GradientReducer reducer_;
  const std::set<int> late_groups_;        // whose gradients are complete only when the pipeline is empty
  const bool has_stage_copies_;            // each stage is on two pipeline ranks
  std::optional<DataParallel> reduction_;  // of the current update
};

}  // namespace echelon
