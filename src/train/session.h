// A whole training run: data, steps, evaluation, checkpoints, log. What `echelon train` does,
// without its printing.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "checkpoint/starting_weights.h"
#include "data/tokens.h"
#include "plan/cost.h"
#include "spec/plan.h"
#include "train/asynchronous.h"
#include "train/dry_run.h"
#include "train/generate.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/planted_expert.h"
#include "train/planted_flip.h"
#include "train/run_options.h"
#include "train/this_machine.h"

namespace echelon {

// A process that kills itself (SIGKILL), to see what is left.
struct PlannedDeath {
  int rank = 0;
  std::int64_t step = 0;  // counts from 1
  // "forward", "backward"; in the middle of a process's large "tp-collective" or "dp-collective"; of a
  // checkpoint "write", "written" (its own part) or "commit" (rank 0)
  std::string where;
};

struct TrainRequest {
  Plan plan;
  OptimizerOptions optimizer;  // total_steps = the last step of the run
  RunOptions run;
  std::optional<AsynchronousOptions> asynchronous;  // workers around a parameter server
  std::optional<Straggler> straggler;
  std::optional<PlantedExpert> planted_expert{};  // in the initial weights
  std::optional<StepPrediction> priced_step{};    // else its parts are timed before the run
  std::optional<double> peak_flops{};             // that MFU is of; else measured before the run
  std::uint64_t seed = 1;
  double validation_fraction = 0.05;
  std::int64_t eval_every = 0;       // steps; 0: at the end only
  std::int64_t eval_samples = 16;    // sequences, at most as many as the validation part has
  std::string checkpoint_directory;  // empty: none
  std::int64_t save_every = 0;       // steps; 0: at the end only
  bool save_beside = false;          // a checkpoint is written while the training goes on
  std::int64_t keep = 0;             // checkpoints, the last ones; 0: all
  bool resume = false;
  std::shared_ptr<const StartingWeights> from{};  // in place of new weights
  std::shared_ptr<const TokenizerFiles>
      tokenizer{};  // of the data, to go with checkpoints; null: the resumed one's
  // A log in CSV where the name ends so, for TensorBoard where it is a directory, else in JSON lines.
  std::vector<std::string> log_paths{};
  bool trace = false;              // every rank records what it does: TrainSummary::rank_timelines
  std::int64_t sample_tokens = 0;  // of text generated at the end; 0: none
  GenerateOptions generate;
  // Asked in each step, on every rank, before its update: true on any of them ends the run after the step,
  // with a checkpoint.
  std::function<bool()> stop_requested{};
  // Rank 0 alone is asked, once it has shown the step, and all wait for what it says: the run ends after that
  // very step, and not after one that others have begun.
  bool stops_at_once = false;
  bool skip_nonfinite = false;          // a step whose loss or gradient is not finite; else it ends the run
  std::int64_t straggler_every = 0;     // steps between reports of how long each rank worked; 0: none
  std::int64_t fingerprint_every = 0;   // steps between fingerprints of the weights; 0: none
  std::int64_t check_every = 0;         // steps between checks of the ranks' bits (replica_check.h); 0: none
  std::int64_t rerun = -1;              // of these steps, the last ones that are run again; below 0: all
  std::optional<PlantedFlip> flip{};
  std::optional<PlannedDeath> death{};  // for tests

  // At the end; the prompt is shorter where the data are.
  SampledText sampled_text() const {
    if (sample_tokens == 0) return {};
    return {std::min<std::int64_t>(32, plan.model.max_seq - sample_tokens), sample_tokens};
  }
};

struct StartInfo {
  std::int64_t train_tokens = 0, validation_tokens = 0, num_files = 0;
  std::int64_t num_params = 0, trained_params = 0, first_step = 0;
  Memory predicted_memory;
  HostActivations predicted_host;
  int ranks = 1;          // parameter servers among them
  JobCores cores;         // for all of them
  double peak_flops = 0;  // of all threads that compute at once, measured by short matrix products
  double predicted_step_seconds = 0;
  std::string resumed_from;
  std::vector<int> staleness;      // predicted, by pipeline rank; empty where the schedule flushes
  std::vector<std::string> notes;  // what was found in the checkpoint directory
};

// Called on rank 0's thread, or the first server's, one at a time. Any may be empty. Ranks of other processes
// than rank 0's call none.
struct TrainObserver {
  Progress on_progress;  // before the start: of reading the checkpoint to go on from
  std::function<void(const StartInfo&)> on_start;
  std::function<void(const StepRecord&)> on_step;
  std::function<void(std::int64_t step, double validation_loss)> on_evaluation;
  std::function<void(const std::string& path)> on_checkpoint;
  std::function<void(std::int64_t step, const std::string& fingerprint)> on_fingerprint;
  std::function<void(const WorkSpread&)> on_spread;
  std::function<void(const Corruption&)> on_corruption;
  std::function<void(const std::vector<std::int32_t>& prompt, const std::vector<std::int32_t>& text)>
      on_sample;
};

// A run that goes on from a checkpoint of its last step is complete: nothing is done, and the summary says
// so.
//
// Everything that can be refused is refused before any rank starts. With processes, every one of them calls
// this; the summary is rank 0's.
TrainSummary train(const TrainRequest& request, const TokenData& data, const TrainObserver& observer);

}  // namespace echelon
