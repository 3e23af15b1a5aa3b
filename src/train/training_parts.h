// What one rank's training works on, whichever driver runs its steps.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/held_stages.h"
#include "parallel/faults.h"
#include "train/gradient_completion.h"
#include "train/optimizer.h"

namespace echelon {

struct StepResult {
  std::int64_t step = 0;  // counts from 0
  double loss = 0;        // mean over all target tokens of the global batch
  // Before clipping; NaN if no rank knows it (a schedule without a flush).
  double gradient_norm = 0;
  double learning_rate = 0;
  std::string skipped{};  // why the step was skipped: what is not finite; empty: it was not
  // Without a barrier: the guess was wrong, so it was undone and forward passes ran again.
  bool taken_back = false;
  // See Trainer::routing(); only if steps end one by one.
  std::vector<RoutingCounts> routing = {};
  // Like the loss, of multi-token prediction; without its weight.
  double mtp_loss = 0;
};

// What data-parallel ranks sum in a step.
enum class DataParallelSums {
  all,
  counts,  // the number of targets and the loss; gradients stay each rank's own
  none,    // nothing: each rank's batch is separate
};

// Deliberate interventions in training, by tests and demonstrations.
struct TrainerHooks {
  Faults faults = {};
  // Called before each instruction, with the step that it belongs to, counted from 1.
  std::function<void(std::int64_t step, const Instruction&)> before_instruction = {};
  // Called when a forward pass has saved what it keeps.
  std::function<void(const Stage::Saved&)> after_forward = {};
  // before_sum: called when an update's passes are over for this layer group, and its gradients are still
  // this rank's own. after_sums: called when all sums are complete.
  std::function<void(int group)> before_sum = {};
  std::function<void()> after_sums = {};
  // Slows a rank down: after the passes of a step it sleeps (slowdown - 1) times as long as they took.
  double slowdown = 1;
  // Whether a step's guessed update counts as wrong, whatever it was.
  std::function<bool(std::int64_t step)> distrusts_guess = {};
};

struct TrainingParts {
  TrainingParts(const Rank& rank_, const Plan& plan_, const OptimizerOptions& optimizer_, std::uint64_t seed,
                TrainerHooks hooks_, std::shared_ptr<const PipelineLayout> pipeline_, Moments moments,
                FirstValues first_values)
      : rank(rank_),
        plan(plan_),
        optimizer(optimizer_),
        hooks(std::move(hooks_)),
        pipeline(pipeline_ ? std::move(pipeline_) : std::make_shared<PipelineLayout>(plan)),
        programs(pipeline->programs(rank.coordinate(Axis::dp))),
        parameters(rank, plan, *pipeline, seed, hooks.faults, moments, first_values),
        gradients(rank, plan, *pipeline, parameters, hooks.faults),
        stages(rank, plan, *pipeline, parameters, hooks.faults) {}
  TrainingParts(const TrainingParts&) = delete;
  TrainingParts& operator=(const TrainingParts&) = delete;

  // See Trainer::updates().
  std::int64_t updates(std::int64_t step) const { return step * programs.updates_per_step() + more_updates; }

  const Rank& rank;
  const Plan plan;
  const OptimizerOptions optimizer;
  const TrainerHooks hooks;
  const std::shared_ptr<const PipelineLayout> pipeline;
  const StepPrograms& programs;
  ParameterStore parameters;
  GradientCompletion gradients;
  const HeldStages stages;
  // Optimizer steps beyond those that `step` training steps make.
  std::int64_t more_updates = 0;
  DataParallelSums sums = DataParallelSums::all;
  bool skips_nonfinite = false;
};

}  // namespace echelon
