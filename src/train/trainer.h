// One rank's training: data in, gradients, optimizer step. The same class on a single rank and on any mesh.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "spec/traffic.h"
#include "train/flush_driver.h"

namespace echelon {

// RequestError if the options clip gradients in a schedule without a flush: it steps each stage by itself,
// before the norm over all stages is known.
void refuse_clipping(const OptimizerOptions& optimizer, const PipelineLayout& pipeline);

class Trainer {
 public:
  // `pipeline`: the plan's layout, if several users share it. Without moments only compute_gradients() may be
  // called.
  Trainer(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer, std::uint64_t seed,
          TrainerHooks hooks = {}, std::shared_ptr<const PipelineLayout> pipeline = nullptr,
          Moments moments = Moments::here, FirstValues first_values = FirstValues::drawn);

  // Runs one training step. Returns the results of all steps that have become known, in order. If the
  // schedule does not flush, or the optimizer has no barrier, ranks continue into the next step and a result
  // is known one step later; after the last of `steps_left` steps (1: this one) the pipeline is empty and
  // everything is known. While a device works on one of several steps, the samples of the next are read: all
  // must come from one source. RunError naming the first tensor if a gradient is not finite.
  std::vector<StepResult> step(std::int64_t step, const SampleSource& samples, std::int64_t steps_left);

  // The two halves of step(), if the schedule flushes and the optimizer has its barrier. compute_gradients():
  // the gradients of the mean loss over all target tokens of the global batch, summed over the mesh; returns
  // that loss. apply_gradients(): clipping and the optimizer's update.
  double compute_gradients(std::int64_t step, const SampleSource& samples);
  StepResult apply_gradients(std::int64_t step, double loss = 0) {
    return flush().apply_gradients(step, loss);
  }

  // Other values than `all` are for compute_gradients() alone, without ZeRO.
  void set_data_parallel_sums(DataParallelSums sums) { parts_.sums = sums; }
  // What the routers of each layer with experts did in the last compute_gradients(), over the whole mesh;
  // losses are means over the tokens of the global batch.
  const std::vector<RoutingCounts>& routing() { return flush().routing(); }
  // StepResult::mtp_loss of the last compute_gradients().
  double mtp_loss() { return flush().mtp_loss(); }
  // What this rank's data decided in the last step() or compute_gradients(); call once.
  DecidedByData take_decided() const { return {parts_.stages.take_moved_copies(), last_run().was_again}; }
  // Bytes of activations that went to the host since the last call, and that were held there (--offload
  // activations).
  HostActivations take_offloaded() const { return parts_.stages.take_offloaded(); }
  // Target tokens of the last compute_gradients(), over the ranks that sum them.
  double num_targets() const { return driver_->num_targets(); }
  // Makes steps with a loss or gradient that is not finite change nothing, instead of ending the run. Needs a
  // flush and the optimizer's barrier: see refuse_skipping().
  void skip_nonfinite() { parts_.skips_nonfinite = true; }

  // Replays the passes of microbatches as CUDA graphs on such a device (train/pass_graphs.h). Call before the
  // first step, for plans that refuse_graphs() accepts. On other devices the same memory is held.
  void replay_passes() { driver_->replay_passes(); }
  // The pool for temporary memory while no passes run: it may be the memory held for graphs.
  MemoryPool pool_between_steps() const {
    return driver_->pass_graphs() == nullptr ? MemoryPool::general : MemoryPool::passes;
  }
  // Empty without graphs.
  std::optional<GraphCounts> graph_counts() const {
    if (driver_->pass_graphs() == nullptr) return {};
    return driver_->pass_graphs()->counts();
  }

  // The mean loss over samples [0, num_samples) of the source, with the current parameters.
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
  // Optimizer steps of the parameters after `step` training steps: more than one each in PipeDream.
  std::int64_t updates(std::int64_t step) const { return parts_.updates(step); }
  // Continues at `step` from parameters with `updates` optimizer steps.
  void resume(std::int64_t step, std::int64_t updates) {
    parts_.more_updates += updates - parts_.updates(step);
  }

 private:
  FlushDriver& flush();

  TrainingParts parts_;
  std::unique_ptr<StepDriver> driver_;
};

}  // namespace echelon
