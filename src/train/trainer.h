// One rank's training: data in, gradients, step. The same class on one rank and on any mesh.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "comm/host_group.h"
#include "parallel/data_parallel.h"
#include "parallel/faults.h"
#include "plan/traffic.h"
#include "spec/plan.h"
#include "train/optimistic_step.h"
#include "train/training_stages.h"
#include "train/weight_versions.h"

namespace echelon {

// A schedule that does not flush steps each stage by itself, before the norm over all stages is known:
// RequestError where the options clip by it.
void refuse_clipping(const OptimizerOptions& optimizer, const PipelineLayout& pipeline);

struct StepResult {
  std::int64_t step = 0;  // counts from 0
  double loss = 0;        // mean over all target tokens of the global batch
  double gradient_norm =
      0;  // before clipping; not a number where no rank knows it (a schedule that does not flush)
  double learning_rate = 0;
  std::string skipped{};    // what is not finite, where the step was skipped for it
  bool taken_back = false;  // without a barrier: a wrong guess was, and forward passes were run again
  std::vector<RoutingCounts> routing = {};  // see Trainer::routing(); only where steps end one by one
};

// What data-parallel ranks add up in a step.
enum class DataParallelSums {
  all,
  counts,  // the number of targets and the loss; gradients stay each rank's own
  none,    // each rank's batch is a batch of its own
};

class Trainer {
 public:
  // `pipeline`: the plan's own, where several users share it. Without moments: for compute_gradients() alone.
  Trainer(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer, std::uint64_t seed,
          const Faults& faults = {}, std::shared_ptr<const PipelineLayout> pipeline = nullptr,
          Moments moments = Moments::here);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // One training step, and the results of all steps that have become known by then, in order. Where the
  // schedule does not flush, or the optimizer has no barrier, ranks go on into the next step and a result is
  // known one step later; after the last of `steps_left` steps (1: this one) the pipeline is empty and
  // everything is known. RunError naming the first tensor when a gradient is not finite.
  std::vector<StepResult> step(std::int64_t step, const SampleSource& samples, std::int64_t steps_left);

  // The two halves of step(), where the schedule flushes and the optimizer has its barrier: gradients of the
  // mean loss over all target tokens of the global batch, summed over the mesh, and that loss; then clipping
  // and the optimizer's update.
  double compute_gradients(std::int64_t step, const SampleSource& samples);
  struct Applied {
    double gradient_norm = 0, learning_rate = 0;
    std::string skipped{};
  };
  Applied apply_gradients(std::int64_t step, double loss = 0);

  // Other than all: for compute_gradients() alone, without ZeRO.
  void set_data_parallel_sums(DataParallelSums sums) { sums_ = sums; }
  // What the routers of each layer that has experts did in the last compute_gradients(), over the whole mesh;
  // the losses are means over the tokens of the global batch.
  const std::vector<RoutingCounts>& routing() const { return routing_; }
  // What this rank's data decided in the last step() or compute_gradients(); once.
  DecidedByData take_decided() const { return {stages_.take_moved_copies(), last_run_.was_again}; }
  // Target tokens behind the last compute_gradients(), over the ranks that add them up.
  double num_targets() const { return num_targets_.at(0); }
  // A step whose loss or gradient is not finite changes nothing and ends nothing. Where the schedule flushes
  // and the optimizer has its barrier: see refuse_skipping().
  void skip_nonfinite() { skips_nonfinite_ = true; }
  // Called before each instruction, with the step that it belongs to, counted from 1.
  void set_watch(std::function<void(std::int64_t step, const Instruction&)> watch) {
    watch_ = std::move(watch);
  }
  // A rank made slow on purpose: after the passes of a step it sleeps (slowdown - 1) times as long as they
  // took.
  void set_slowdown(double slowdown) { slowdown_ = slowdown; }

  // Mean loss over samples [0, num_samples) of the source, at the present parameters.
  double evaluate(std::int64_t num_samples, const SampleSource& samples);

  const ParameterStore& parameters() const { return parameters_; }
  const HeldStages& stages() const { return stages_; }
  // What compression carries from step to step: part of a checkpoint.
  std::vector<CarriedTensor> carried() const { return reducer_.carried(); }
  const PipelineLayout& pipeline() const { return *pipeline_; }
  bool flushes() const { return programs_.flushes(); }
  // What this rank ran in the last step, and when.
  const PipelineRun& last_run() const { return last_run_; }
  const Plan& plan() const { return plan_; }
  const Rank& rank() const { return rank_; }
  // Optimizer steps behind the parameters when `step` training steps are: more than one each under PipeDream.
  std::int64_t updates(std::int64_t step) const {
    return step * programs_.updates_per_step() + more_updates_;
  }
  // Goes on from parameters that have `updates` optimizer steps behind them at `step`.
  void resume(std::int64_t step, std::int64_t updates) {
    more_updates_ = updates - step * programs_.updates_per_step();
  }

 private:
  TrainingStages::Hooks hooks();
  StepBatch load_step(int step);
  void begin_update();
  void run(const StepPrograms::Program& program);
  void before_pass(const Instruction& i);
  void finish_group(int group);
  void finish_reduction();
  void update(const Instruction& i);
  double complete_gradients();
  void count_routing();
  std::vector<StepResult> stream_step(std::int64_t step, std::int64_t steps_left);
  std::vector<StepResult> optimistic_step(std::int64_t step, std::int64_t steps_left);
  bool validate();
  double make_true_step();
  std::string first_nonfinite(double loss) const;
  [[noreturn]] void refuse_step(std::int64_t step, double learning_rate, double loss) const;
  void add_pipeline_copies();
  std::vector<double> sum_over(std::initializer_list<Communicator*> groups,
                               std::vector<double> values) const;

  const Rank& rank_;
  Plan plan_;
  OptimizerOptions optimizer_;
  Faults faults_;
  std::shared_ptr<const PipelineLayout> pipeline_;
  const StepPrograms& programs_;
  ParameterStore parameters_;
  GradientReducer reducer_;
  HeldStages stages_;
  TrainingStages training_;
  PipelineExecutor executor_;
  std::set<int> late_groups_;  // with a parameter whose gradient is complete only when the pipeline is empty
  std::optional<DataParallel> reduction_;  // of the gradients that are being added up
  PipelineRun last_run_;
  std::vector<RoutingCounts> routing_;
  std::int64_t more_updates_ = 0;
  DataParallelSums sums_ = DataParallelSums::all;
  double slowdown_ = 1;
  bool skips_nonfinite_ = false;
  std::function<void(std::int64_t, const Instruction&)> watch_;

  // The steps that are under way.
  const SampleSource* samples_ = nullptr;
  std::int64_t first_step_ = 0;             // what step 0 of the stream is
  int stream_step_ = 0;                     // done of the stream
  int stream_updates_ = 0;                  // by this rank; none where the schedule flushes
  std::map<int, double> num_targets_;       // of the global batch, by step of the stream
  std::optional<WeightVersions> versions_;  // where the schedule does not flush
  struct Unfinished {
    StepResult result;
    HostNumbers loss_sum, squares;  // over the pipeline
    double num_targets = 0;
  };
  Unfinished unfinished(std::int64_t step, double loss_sum, double num_targets);
  void finish_result();
  std::optional<Unfinished> unfinished_;
  std::vector<StepResult> finished_;          // since step() was called
  std::optional<OptimisticStep> optimistic_;  // where the optimizer has no barrier
};

}  // namespace echelon
