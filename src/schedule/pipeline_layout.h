// Which layers each pipeline stage has, and which stages and parameters each pipeline rank holds. The trainer
// and the predictions share this.
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

// Whether the schedule flushes, so that all microbatches of a step see the same weights: all schedules but
// PipeDream and 2BW.
bool flushes(const Plan& plan);

// The rules that spec/plan_rules cannot check: that the plan's schedule exists, and that the layers fit its
// stages.
std::optional<Refusal> schedule_refusal(const Plan& plan);
std::optional<Refusal> stages_refusal(const Plan& plan, int stages);
// All ranks that run the same stage (DualPipe) must recompute the same ops: predictions and drawings treat
// their passes alike.
std::optional<Refusal> copies_refusal(const Plan& plan, const std::vector<std::vector<int>>& stages_of_ranks);

// All checks of a plan before it runs: the rules of spec/plan_rules, and that it has a PipelineLayout. Throws
// PlanRefusal, whose remedies the caller tries out.
void check_whole(const Plan& plan);

// Whether all microbatches have equally many samples.
bool are_alike(const std::vector<Range>& microbatches);
// Embedding rows that a data-parallel rank looks up in a step, on each of its cp ranks.
std::int64_t looked_up_rows(const Plan& plan, int dp_rank);
// Whether a rank that holds a tied table at both ends of the model may keep the gradients of lookups, of
// every microbatch, until the step ends (ParameterStore). Its peak memory then depends on all microbatches.
bool may_keep_lookups(const Plan& plan, int dp_rank);
// Which part of a plan's step a PipelineLayout holds: whole, or steady, where microbatches are alike: only as
// many passes as show the peak memory (steady_microbatches()), with the tokens of all.
enum class StepLength { whole, steady };

// All parameters of the model, in the same order on every rank: collectives over parameters iterate over this
// list.
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
  // RequestError if the plan's schedule, stages and layers do not fit together.
  explicit PipelineLayout(const Plan& plan, StepLength length = StepLength::whole);
  // For one rank only, with repeated passes removed (microbatches must be alike). It has the same peak
  // memory.
  PipelineLayout of_rank(int pp_rank) const;

  const std::vector<StageSlice>& slices() const { return slices_; }
  // The stages that a pipeline rank holds, ascending.
  const std::vector<int>& stages_of(int pp_rank) const { return held_[static_cast<std::size_t>(pp_rank)]; }
  // The parameters of a pipeline rank in layer groups: for each of its stages the embedding, each block and
  // the head, if it has them. A tied output matrix belongs to the head's group unless the rank holds the
  // embedding too. The output matrix and its bias, which are used together, are in one group. Under
  // vocabulary parallelism, the rank's part of the output layer is the last group.
  // Routed experts are those of rank `ep_index` of an expert group.
  const std::vector<std::vector<ParamSpec>>& groups_of(int pp_rank, int ep_index) const {
    return (*groups_)[static_cast<std::size_t>(pp_rank)][static_cast<std::size_t>(ep_index)];
  }
  // The pipeline ranks that hold a parameter, ascending; the first one counts it and saves it. Several hold a
  // tied embedding whose ends are on two ranks, every parameter in DualPipe, and one that is cut into parts;
  // for a single part it is the rank that has it.
  std::vector<int> holders_of(const ParamSpec& parameter) const;
  const std::shared_ptr<const HeldModel>& model() const { return model_; }
  // How many ranks run each stage, each for an equal consecutive part of the microbatches: 2 in DualPipe.
  int stage_copies() const { return stage_copies_; }
  // The programs of a data-parallel rank's pipeline.
  const StepPrograms& programs(int dp_rank) const {
    return programs_.at(microbatches_[static_cast<std::size_t>(dp_rank)]);
  }
  // Whether the rank holds both the embedding and the tied output layer, so that their gradients meet there.
  bool ties_on(int pp_rank) const;
  // Whether the rank holds the last stage.
  bool ends_on(int pp_rank) const;
  // Whether the embedding's backward pass reads its weights.
  bool reads_embedding_again() const { return reads_embedding_again_; }
  // Index of a stage's first layer group among those of a pipeline rank that holds it.
  int first_group(int pp_rank, int stage) const;
  // Index of the group with the output layer's matrix, on a rank that holds it.
  int output_group(int pp_rank) const;
  // The groups that have a parameter whose gradient is complete only when the pipeline is empty.
  std::set<int> late_groups(int pp_rank) const;

 private:
  using Groups = std::vector<std::vector<std::vector<std::vector<ParamSpec>>>>;  // [pp][ep]

  void hold(const Plan& plan, const Schedule& schedule);

  std::vector<int> microbatches_;         // by data-parallel rank
  std::map<int, StepPrograms> programs_;  // by number of microbatches: at most two
  bool shares_table_ = false;             // the embedding's matrix is used at both ends
  bool reads_embedding_again_ = false;
  int stage_copies_ = 1;
  std::string output_name_;  // the output layer's matrix
  std::vector<StageSlice> slices_;
  std::vector<std::vector<int>> held_;
  std::shared_ptr<const Groups> groups_;
  std::shared_ptr<const HeldModel> model_;
};

// Whether a pipeline rank with both ends of a tied table accumulates its two gradients, of lookup and output
// layer, separately. It does if a step has several microbatches, so that the sum is grouped as on two ranks.
bool keeps_tied_gradient_apart(const Plan& plan, const PipelineLayout& pipeline, int dp_rank, int pp_rank);

}  // namespace echelon
