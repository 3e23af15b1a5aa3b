// Which layers each pipeline stage has, and which stages and parameters each pipeline rank holds: what the
// trainer and the predictions must agree on.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "schedule/stage_flops.h"
#include "schedule/step_programs.h"
#include "spec/plan.h"
#include "spec/plan_refusal.h"

namespace echelon {

// Whether all microbatches of a step see the same weights: every schedule but PipeDream and 2BW.
bool flushes(const Plan& plan);

// What the rules of spec/plan_rules cannot know: whether there is a schedule of the plan's name, and whether
// the layers go over the stages that it has.
std::optional<Refusal> schedule_refusal(const Plan& plan);
std::optional<Refusal> stages_refusal(const Plan& plan, int stages);
// Ranks that run the same stage (DualPipe) make the same again: its passes are priced and drawn as one's.
std::optional<Refusal> copies_refusal(const Plan& plan, const std::vector<std::vector<int>>& stages_of_ranks);

// All that a plan must pass before it is run: its rules, and that it has a PipelineLayout. PlanRefusal, whose
// remedies the caller tries.
void check_whole(const Plan& plan);

// Microbatches of as many samples each.
bool are_alike(const std::vector<Range>& microbatches);
// Rows of the embedding that a data-parallel rank looks up in a step, on each rank along cp.
std::int64_t looked_up_rows(const Plan& plan, int dp_rank);
// Whether a rank that has a tied table at both ends may keep what lookups add to it until the step ends
// (ParameterStore), of each microbatch: then none of them can be left out.
bool may_keep_lookups(const Plan& plan, int dp_rank);
// The programs of a plan's step: all of it, or, where its microbatches are alike, no more of their passes
// than show the peak (steady_microbatches()), with the tokens of all of them.
enum class StepLength { whole, steady };

// The whole model's parameters, in the same order on every rank: what collectives over parameters walk.
struct HeldModel {
  struct Place {
    std::size_t index = 0;
    std::vector<int> holders;  // pipeline ranks, ascending: see PipelineLayout::holders_of
  };
  std::vector<ParamSpec> parameters;
  std::unordered_map<std::string, Place> places;  // by name

  const Place& place_of(const std::string& name) const;
};

class PipelineLayout {
 public:
  // RequestError when the plan's schedule, stages and layers do not go together.
  explicit PipelineLayout(const Plan& plan, StepLength length = StepLength::whole);
  // What one rank runs, without what it repeats: of a step whose microbatches are alike. It has the same
  // peak.
  PipelineLayout of_rank(int pp_rank) const;

  const std::vector<StageSlice>& slices() const { return slices_; }
  // Stages that a pipeline rank holds, ascending.
  const std::vector<int>& stages_of(int pp_rank) const { return held_[static_cast<std::size_t>(pp_rank)]; }
  // Parameters of a pipeline rank in layer groups: for each of its stages the embedding, each block, the
  // head, where it has them. A tied output matrix is part of the head's group where the rank does not hold
  // the embedding as well. Where the output layer is cut over the ranks, each one's part is a group of its
  // own, the last. Of routed experts those at the place `ep_index` of an expert group.
  const std::vector<std::vector<ParamSpec>>& groups_of(int pp_rank, int ep_index) const {
    return (*groups_)[static_cast<std::size_t>(pp_rank)][static_cast<std::size_t>(ep_index)];
  }
  // Pipeline ranks that hold a parameter, ascending: more than one for a tied embedding whose ends are on two
  // ranks, for every stage of DualPipe, and for one that they have in parts. The first one counts and saves
  // it. Of a part the one that has it.
  std::vector<int> holders_of(const ParamSpec& parameter) const;
  const std::shared_ptr<const HeldModel>& model() const { return model_; }
  // Ranks that run a stage, each for as many microbatches, one run of them after another: 2 in DualPipe.
  int stage_copies() const { return stage_copies_; }
  // What the pipeline of a data-parallel rank runs.
  const StepPrograms& programs(int dp_rank) const {
    return programs_.at(microbatches_[static_cast<std::size_t>(dp_rank)]);
  }
  // Whether embedding and tied output layer are on one rank, so that their gradients meet there.
  bool ties_on(int pp_rank) const;
  // Whether the last stage is.
  bool ends_on(int pp_rank) const;
  // Whether the embedding's weights are read in its backward pass.
  bool reads_embedding_again() const { return reads_embedding_again_; }
  // The first of a stage's layer groups among those of a pipeline rank that holds it.
  int first_group(int pp_rank, int stage) const;
  // The layer group that has the output layer's matrix, on a rank that holds it.
  int output_group(int pp_rank) const;
  // Layer groups with a parameter whose gradient is complete only when the pipeline is empty.
  std::set<int> late_groups(int pp_rank) const;

 private:
  using Groups = std::vector<std::vector<std::vector<std::vector<ParamSpec>>>>;  // [pp][ep]

  void hold(const Plan& plan, const Schedule& schedule);

  std::vector<int> microbatches_;         // of each data-parallel rank
  std::map<int, StepPrograms> programs_;  // by number of microbatches: at most two
  bool shares_table_ = false;             // the embedding's, at both ends
  bool reads_embedding_again_ = false;
  int stage_copies_ = 1;
  std::string output_name_;  // of the output layer's matrix
  std::vector<StageSlice> slices_;
  std::vector<std::vector<int>> held_;
  std::shared_ptr<const Groups> groups_;
  std::shared_ptr<const HeldModel> model_;
};

// Whether the two gradients of a tied table, of lookup and of output layer, are added up apart on a pipeline
// rank that has both: where a step has several microbatches, so that the sum is grouped as on two ranks.
bool keeps_tied_gradient_apart(const Plan& plan, const PipelineLayout& pipeline, int dp_rank, int pp_rank);

}  // namespace echelon
