// What one rank's training works on, whatever drives its steps.
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
  double gradient_norm =
      0;  // before clipping; not a number where no rank knows it (a schedule that does not flush)
  double learning_rate = 0;
  std::string skipped{};    // what is not finite, where the step was skipped for it
  bool taken_back = false;  // without a barrier: a wrong guess was, and forward passes were run again
  std::vector<RoutingCounts> routing = {};  // see Trainer::routing(); only where steps end one by one
  // As the loss, of the token behind each target, where a model predicts it too; not weighed.
  double mtp_loss = 0;
};

// What data-parallel ranks add up in a step.
enum class DataParallelSums {
  all,
  counts,  // the number of targets and the loss; gradients stay each rank's own
  none,    // each rank's batch is a batch of its own
};

// What tests, and runs that are to show something, do to a training on purpose.
struct TrainerHooks {
  Faults faults = {};
  // Called before each instruction, with the step that it belongs to, counted from 1.
  std::function<void(std::int64_t step, const Instruction&)> before_instruction = {};
  // What a forward pass keeps is there.
  std::function<void(const Stage::Saved&)> after_forward = {};
  // The passes of an update are over for this layer group, and its gradients this rank's own; then all sums are
  // there.
  std::function<void(int group)> before_sum = {};
  std::function<void()> after_sums = {};
  // A rank made slow: after the passes of a step it sleeps (slowdown - 1) times as long as they took.
  double slowdown = 1;
  // Whether the guess of a step's update counts as wrong, whatever it was.
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
  std::int64_t more_updates = 0;  // than `step` steps make
  DataParallelSums sums = DataParallelSums::all;
  bool skips_nonfinite = false;
};

}  // namespace echelon
