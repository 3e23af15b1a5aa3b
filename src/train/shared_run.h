// What the ranks of one training run share: the request and what was found out before they started.
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
  CheckpointInfo resumed;  // path empty: from the start
  StartInfo start;
  const TrainObserver& observer;
  std::shared_ptr<const PipelineLayout> pipeline;
  RunOutputs* outputs = nullptr;       // used by rank 0 alone
  Utilization* utilization = nullptr;  // the same
  Clock::time_point epoch{};           // zero of the measured timeline

  FirstValues first_values() const {
    return request.from || !resumed.path.empty() ? FirstValues::read : FirstValues::drawn;
  }
};

// The optimizer's step and what it cost, in tokens and seconds.
StepRecord record_of(const StepResult& result, std::int64_t tokens, double seconds);

// What rank 0 sends in the last of so many steps; where the schedule does not flush, in each on average: as
// it is measured. `decided` by that step, or by all of the stream's; without it under traffic_assumptions().
Traffic predicted_traffic(const SharedRun& run, std::int64_t steps,
                          const std::optional<DecidedByData>& decided = {});

// From `step` on, until the next checkpoint or the end, where the pipeline must be empty; without a barrier
// in the optimizer until the next evaluation too, which wants the true weights.
std::int64_t steps_until_empty(const SharedRun& run, std::int64_t step, std::int64_t last_step);

// By the one rank that leads: counts, logs and shows the step.
void publish(const SharedRun& run, StepRecord record, TrainSummary& summary);

// The same of a checkpoint that is whole, of so many steps.
void publish_checkpoint(const SharedRun& run, std::int64_t step, const std::string& path,
                        TrainSummary& summary);

// The same of a fingerprint of the weights after `step`.
void publish_fingerprint_of(const SharedRun& run, std::int64_t step, const std::string& fingerprint,
                            TrainSummary& summary);

// A sentence on what a run that goes on does otherwise than the one that wrote its checkpoint; empty:
// nothing.
std::string changed_settings(const SharedRun& run);

// What a checkpoint of the run says after so many steps, of which this run has trained on `tokens`.
CheckpointInfo checkpoint_info(const SharedRun& run, std::int64_t step, std::int64_t updates,
                               std::int64_t tokens);

// Silent corruption that was found, and the steps of it that other numbers had been published of.
void publish_corruption(const SharedRun& run, const Corruption& corruption, TrainSummary& summary);
void publish_again(const SharedRun& run, const StepRecord& record, TrainSummary& summary);

AsynchronousRun asynchronous_run(const SharedRun& run);

}  // namespace echelon
