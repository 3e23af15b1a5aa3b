// One rank's training: data in, gradients, step. The same class on one rank and on any mesh.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "spec/traffic.h"
#include "train/flush_driver.h"

namespace echelon {

// A schedule that does not flush steps each stage by itself, before the norm over all stages is known:
// RequestError where the options clip by it.
void refuse_clipping(const OptimizerOptions& optimizer, const PipelineLayout& pipeline);

class Trainer {
 public:
  // `pipeline`: the plan's own, where several users share it. Without moments: for compute_gradients() alone.
  Trainer(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer, std::uint64_t seed,
          TrainerHooks hooks = {}, std::shared_ptr<const PipelineLayout> pipeline = nullptr,
          Moments moments = Moments::here, FirstValues first_values = FirstValues::drawn);

  // One training step, and the results of all steps that have become known by then, in order. Where the
  // schedule does not flush, or the optimizer has no barrier, ranks go on into the next step and a result is
  // known one step later; after the last of `steps_left` steps (1: this one) the pipeline is empty and
  // everything is known. RunError naming the first tensor when a gradient is not finite.
  // While one of several steps is at work a device's next samples are read: all are of one source.
  std::vector<StepResult> step(std::int64_t step, const SampleSource& samples, std::int64_t steps_left);

  // The two halves of step(), where the schedule flushes and the optimizer has its barrier: gradients of the
  // mean loss over all target tokens of the global batch, summed over the mesh, and that loss; then clipping
  // and the optimizer's update.
  double compute_gradients(std::int64_t step, const SampleSource& samples);
  StepResult apply_gradients(std::int64_t step, double loss = 0) {
    return flush().apply_gradients(step, loss);
  }

  // Other than all: for compute_gradients() alone, without ZeRO.
  void set_data_parallel_sums(DataParallelSums sums) { parts_.sums = sums; }
  // What the routers of each layer that has experts did in the last compute_gradients(), over the whole mesh;
  // the losses are means over the tokens of the global batch.
  const std::vector<RoutingCounts>& routing() { return flush().routing(); }
  // StepResult::mtp_loss of the last compute_gradients().
  double mtp_loss() { return flush().mtp_loss(); }
  // What this rank's data decided in the last step() or compute_gradients(); once.
  DecidedByData take_decided() const { return {parts_.stages.take_moved_copies(), last_run().was_again}; }
  // What went to the host of its activations since the last call, and lay there (--offload activations).
  HostActivations take_offloaded() const { return parts_.stages.take_offloaded(); }
  // Target tokens behind the last compute_gradients(), over the ranks that add them up.
  double num_targets() const { return driver_->num_targets(); }
  // A step whose loss or gradient is not finite changes nothing and ends nothing. Where the schedule flushes
  // and the optimizer has its barrier: see refuse_skipping().
  void skip_nonfinite() { parts_.skips_nonfinite = true; }

  // The passes of microbatches are CUDA graphs where a device runs them (train/pass_graphs.h), before the
  // first step; for what refuse_graphs() does not refuse. Elsewhere the same memory is held.
  void replay_passes() { driver_->replay_passes(); }
  // What comes and goes while no passes run may have the memory that is held for graphs.
  MemoryPool pool_between_steps() const {
    return driver_->pass_graphs() == nullptr ? MemoryPool::general : MemoryPool::passes;
  }
  // Nothing without.
  std::optional<GraphCounts> graph_counts() const {
    if (driver_->pass_graphs() == nullptr) return {};
    return driver_->pass_graphs()->counts();
  }

  // Mean loss over samples [0, num_samples) of the source, at the present parameters.
  double evaluate(std::int64_t num_samples, const SampleSource& samples);

  const ParameterStore& parameters() const { return parts_.parameters; }
  const HeldStages& stages() const { return parts_.stages; }
  // What compression carries from step to step: part of a checkpoint.
  std::vector<CarriedTensor> carried() const { return parts_.gradients.carried(); }
  const PipelineLayout& pipeline() const { return *parts_.pipeline; }
  bool flushes() const { return parts_.programs.flushes(); }
  // What this rank ran in the last step, and when.
  const PipelineRun& last_run() const { return driver_->last_run(); }
  const Plan& plan() const { return parts_.plan; }
  const Rank& rank() const { return parts_.rank; }
  // Optimizer steps behind the parameters when `step` training steps are: more than one each under PipeDream.
  std::int64_t updates(std::int64_t step) const { return parts_.updates(step); }
  // Goes on from parameters that have `updates` optimizer steps behind them at `step`.
  void resume(std::int64_t step, std::int64_t updates) {
    parts_.more_updates += updates - parts_.updates(step);
  }

 private:
  FlushDriver& flush();

  TrainingParts parts_;
  std::unique_ptr<StepDriver> driver_;
};

}  // namespace echelon
