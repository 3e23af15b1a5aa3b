// A whole training run: data, steps, evaluation, checkpoints, log. What `echelon train` does, without its
// printing.
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

// A process that kills itself (SIGKILL), to test what is left.
struct PlannedDeath {
  int rank = 0;
  std::int64_t step = 0;  // counts from 1
  // "forward", "backward"; "tp-collective" or "dp-collective": in the middle of a large one; "write",
  // "written" (its own part) or "commit" (rank 0) of a checkpoint.
  std::string where;
};

struct TrainRequest {
  Plan plan;
  OptimizerOptions optimizer;  // total_steps = the last step of the run
  RunOptions run;
  std::optional<AsynchronousOptions> asynchronous;  // with parameter servers
  std::optional<Straggler> straggler;
  std::optional<PlantedExpert> planted_expert{};  // in the initial weights
  std::optional<StepPrediction> priced_step{};    // empty: parts of a step are timed before the run
  std::optional<double> peak_flops{};             // to which MFU is relative; empty: measured before the run
  std::uint64_t seed = 1;
  double validation_fraction = 0.05;
  std::int64_t eval_every = 0;       // steps; 0: at the end only
  std::int64_t eval_samples = 16;    // sequences; at most those of the validation part
  std::string checkpoint_directory;  // empty: none
  std::int64_t save_every = 0;       // steps; 0: at the end only
  bool save_beside = false;          // writes checkpoints while training goes on
  std::int64_t keep = 0;             // number of checkpoints to keep, the last ones; 0: all
  bool resume = false;
  std::shared_ptr<const StartingWeights> from{};  // instead of new weights
  // The data's tokenizer, saved with checkpoints; null: that of the resumed checkpoint.
  std::shared_ptr<const TokenizerFiles> tokenizer{};
  // Logs: CSV if the name ends in .csv, TensorBoard if it is a directory, else JSON lines.
  std::vector<std::string> log_paths{};
  bool trace = false;              // every rank records what it does: TrainSummary::rank_timelines
  std::int64_t sample_tokens = 0;  // length of the text generated at the end; 0: none
  GenerateOptions generate;
  // Asked in each step, on every rank, before its update. If any rank says true, the run ends after the step,
  // with a checkpoint.
  std::function<bool()> stop_requested{};
  // Asks only rank 0, after it has shown the step, and all ranks wait for the answer: the run ends after that
  // very step, and not after one that others have already begun.
  bool stops_at_once = false;
  bool skip_nonfinite = false;  // skips steps whose loss or gradient is not finite, instead of ending the run
  std::int64_t straggler_every = 0;     // steps between reports of how long each rank worked; 0: none
  std::int64_t fingerprint_every = 0;   // steps between fingerprints of the weights; 0: none
  std::int64_t check_every = 0;         // steps between checks of the ranks' bits (replica_check.h); 0: none
  std::int64_t rerun = -1;              // how many of these steps, the last ones, run again; below 0: all
  std::optional<PlantedFlip> flip{};
  std::optional<PlannedDeath> death{};  // for tests

  // The text generated at the end; the prompt is shorter if the data are.
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
  int ranks = 1;   // parameter servers included
  JobCores cores;  // for all ranks
  // Of all threads that compute at once, measured by short matrix products.
  double peak_flops = 0;
  double predicted_step_seconds = 0;
  std::string resumed_from;
  std::vector<int> staleness;      // predicted, by pipeline rank; empty if the schedule flushes
  std::vector<std::string> notes;  // findings in the checkpoint directory
};

// Called on the thread of rank 0, or of the first server, one at a time. Any may be empty. Other processes
// than rank 0's call none.
struct TrainObserver {
  Progress on_progress;  // before the start: of reading the checkpoint to resume from
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

// A run that resumes from a checkpoint of its last step is complete: nothing is done, and the summary says
// so.
//
// Everything that can be refused is refused before any rank starts. With processes, every one of them calls
// this; the summary is rank 0's.
TrainSummary train(const TrainRequest& request, const TokenData& data, const TrainObserver& observer);

}  // namespace echelon
