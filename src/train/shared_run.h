// What the ranks of a training run share: the request, and what was determined before they started.
#pragma once

#include <memory>
#include <vector>

#include "base/clock.h"
#include "checkpoint/checkpoint.h"
#include "train/run_outputs.h"
#include "train/session.h"
#include "train/trainer.h"

namespace echelon {

struct SharedRun {
  const TrainRequest& request;
  const TokenData& data;
  Split split;
  CheckpointInfo resumed;  // empty path: a new run
  StartInfo start;
  const TrainObserver& observer;
  std::shared_ptr<const PipelineLayout> pipeline;
  RunOutputs* outputs = nullptr;       // used by rank 0 only
  Utilization* utilization = nullptr;  // used by rank 0 only
  Clock::time_point epoch{};           // zero of the measured timeline

  FirstValues first_values() const {
    return request.from || !resumed.path.empty() ? FirstValues::read : FirstValues::drawn;
  }
};

// The optimizer's step and what it cost, in tokens and seconds.
StepRecord record_of(const StepResult& result, std::int64_t tokens, double seconds);

// The traffic of rank 0 in the last of `steps` steps or, if the schedule does not flush, the mean over steps:
// comparable with what is measured. `decided`: by that step, or by all of the stream's; without it under
// traffic_assumptions().
Traffic predicted_traffic(const SharedRun& run, std::int64_t steps,
                          const std::optional<DecidedByData>& decided = {});

// Steps from `step` until the pipeline must be empty: at the next checkpoint or the end; without an optimizer
// barrier also at the next evaluation, which needs the true weights.
std::int64_t steps_until_empty(const SharedRun& run, std::int64_t step, std::int64_t last_step);

// Called by rank 0: counts, logs and shows a step.
void publish(const SharedRun& run, StepRecord record, TrainSummary& summary);

// The same for a complete checkpoint after `step` steps.
void publish_checkpoint(const SharedRun& run, std::int64_t step, const std::string& path,
                        TrainSummary& summary);

// The same for a fingerprint of the weights after `step`.
void publish_fingerprint_of(const SharedRun& run, std::int64_t step, const std::string& fingerprint,
                            TrainSummary& summary);

// A sentence on how a resumed run differs from the one that wrote its checkpoint; empty if it does not.
std::string changed_settings(const SharedRun& run);

// The metadata of a checkpoint after `step` steps; this run has trained on `tokens`. RunError where the data
// is no longer what it was at the start.
CheckpointInfo checkpoint_info(const SharedRun& run, std::int64_t step, std::int64_t updates,
                               std::int64_t tokens);

// Publishes a silent corruption, and the corrected record of a step that was published with other numbers.
void publish_corruption(const SharedRun& run, const Corruption& corruption, TrainSummary& summary);
void publish_again(const SharedRun& run, const StepRecord& record, TrainSummary& summary);

AsynchronousRun asynchronous_run(const SharedRun& run);

}  // namespace echelon
