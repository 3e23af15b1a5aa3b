// What a run measures, in the formats that docs/predictions.md promises to programs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/zero.h"
#include "plan/assumptions.h"
#include "plan/cost.h"
#include "schedule/timeline.h"
#include "spec/memory.h"
#include "spec/plan.h"
#include "spec/traffic.h"
#include "train/pass_graphs.h"

namespace echelon {

// A layer's experts in one step.
struct ExpertLoad {
  std::int64_t layer = 0;
  double imbalance = 0;         // load / average of the busiest expert
  double drop_rate = 0;         // fraction of all choices
  double balance_loss = 0;      // of the router, z-loss included
  std::vector<double> tokens;   // sent to each expert
  std::vector<double> dropped;  // of these tokens
};

struct StepRecord {
  std::int64_t step = 0;  // counts from 1
  double loss = 0, grad_norm = 0, lr = 0;
  std::int64_t tokens = 0;  // of this step, over all ranks
  double tokens_per_second = 0, mfu = 0, step_seconds = 0;
  std::string skipped{};            // why there was no update; empty: there was one
  std::vector<ExpertLoad> experts;  // by layer; empty without experts
  double mtp_loss = 0;              // see StepResult
};

// Model FLOPs utilization (MFU). The cores' true peak is unknown; the fastest rate ever seen is a lower
// bound. Usually that is a matrix product on an idle machine, but it may be a training step if the machine
// was busy when the products were measured.
class Utilization {
 public:
  explicit Utilization(double peak_flops) : peak_flops_(peak_flops) {}
  double of(double flops) {
    was_exceeded_ = was_exceeded_ || flops > peak_flops_;
    raise(flops);
    return flops / peak_flops_;
  }
  void raise(double flops) { peak_flops_ = std::max(peak_flops_, flops); }
  // Whether something was faster than the measured peak.
  bool was_exceeded() const { return was_exceeded_; }
  double peak_flops() const { return peak_flops_; }

 private:
  double peak_flops_;
  bool was_exceeded_ = false;
};

// A run with parameter servers.
struct AsynchronousSummary {
  std::optional<std::int64_t> bound;  // empty: none
  // Entry n counts pushes of workers that were n batches ahead of the slowest when they pulled.
  std::vector<std::int64_t> histogram;
  double mean_updates_late = 0;  // optimizer steps between a push and its pull
  std::int64_t max_updates_late = 0;
  std::int64_t updates = 0;                  // optimizer steps of this run
  Memory predicted_memory, measured_memory;  // peak of the first server
};

struct TrainSummary {
  std::int64_t steps = 0;      // done by this run
  std::int64_t last_step = 0;  // counts from 1; a resumed run continues the count
  double final_loss = 0;
  double tokens_per_second = 0, mfu = 0;  // from the median step
  double step_seconds = 0, predicted_step_seconds = 0;
  int ranks = 1;
  JobCores cores;
  double peak_flops = 0;  // to which MFU is relative
  std::int64_t num_params = 0, trained_params = 0;
  Memory predicted_memory, measured_memory;     // peak of rank 0
  // Of rank 0, with --offload activations: predicted of a step; measured, the most of all steps.
  HostActivations predicted_host, measured_host;
  Traffic predicted_traffic, measured_traffic;  // what rank 0 sends in one step
  // Assumptions of the predictions. traffic_by_data: rank 0's traffic given what the data decided, equal to
  // the measured one.
  std::vector<Assumption> memory_assumptions, traffic_assumptions;
  Traffic traffic_by_data;
  Traffic measured_messages;        // sent by collectives built on messages
  std::vector<ExpertLoad> experts;  // of the last step
  std::optional<double> validation_loss;
  std::string checkpoint;           // the last one written
  std::string fingerprint;          // of the final weights, if asked for
  double checkpoint_seconds = 0;    // the longest pause of training for one
  bool complete = false;            // the checkpoint to resume from already had all steps
  bool stopped = false;             // before its last step, on request
  std::int64_t checked_steps = 0;   // run twice, to compare their bits
  double check_seconds = 0;         // that this took
  Traffic checked_traffic;          // sent by rank 0 for this
  std::int64_t corruptions = 0;     // found and repaired
  std::int64_t skipped = 0;         // steps with a loss or gradient that was not finite
  double predicted_bubble = 0,
         measured_bubble = 0;         // idle fraction of a pipeline rank's time, mean over ranks
  std::optional<GraphCounts> graphs;  // if passes are replayed as graphs
  // Speculative steps that were wrong, without an optimizer barrier.
  std::int64_t taken_back = 0;
  std::optional<ParameterGather::Measures> gathers;  // ZeRO 3: rank 0 in the last step
  // The staleness of gradients in optimizer steps, at most, by pipeline rank; empty if the schedule flushes.
  std::vector<int> predicted_staleness, measured_staleness;
  std::optional<AsynchronousSummary> asynchronous;
  // The last step of the first pipeline (dp 0, tp 0), in seconds: as it ran, and its schedule simulated with
  // the measured times of its instructions. For a stream, the last few steps.
  Timeline measured_timeline, simulated_timeline;
  // By rank of the job, servers after workers: the last steps and what followed them. Empty unless asked for.
  std::vector<RankTimeline> rank_timelines;
};

// A silent corruption that was found (train/replica_check.h).
struct Corruption {
  std::int64_t step = 0, found_after = 0;  // count from 1
  std::vector<int> ranks;                  // at fault; for a message its sender and receiver
  std::string what;                        // in words
  bool repaired = false;                   // the steps ran again, and the run goes on with the right state
};

// How long each rank worked per step, without waiting for others, averaged over some steps.
struct WorkSpread {
  std::int64_t first_step = 0, last_step = 0;
  std::vector<double> seconds;  // per step, by rank
  int slowest() const;
  // The slowest rank's time over the median of the others'; 1 if these took none.
  double slowdown() const;
};

// A loss to four decimals, or "nan": processors give their NaN a sign, which says nothing.
std::string loss_text(double loss);
std::string to_json(const WorkSpread& spread);
std::string to_json(const StepRecord& record);
std::string to_json(const TrainSummary& summary);
std::string evaluation_json(std::int64_t step, double validation_loss);
std::string to_json(const Corruption& corruption);
std::string fingerprint_json(std::int64_t step, const std::string& fingerprint);

// A table of offloaded activations; empty if there are none.
std::string offload_table(const char* first, const HostActivations& a, const char* second,
                          const HostActivations& b);
// Tables for people, aligned, of {"parameters": n, ..., "total": n} and of {"tp": {"all_reduce": bytes, ...},
// ...}.
std::string memory_table(const std::string& title, const char* first, const Memory& a, const char* second,
                         const Memory& b);
std::string bytes_row(const std::string& name, std::int64_t first, std::int64_t second);  // of such a table
std::string traffic_table(const TrainSummary& summary);
// The assumptions of the table above it, in words; empty if there are none.
std::string assumption_note(const std::vector<Assumption>& assumptions);
// A sentence for each prediction (memory, traffic, step time, bubble) that is off by more than a tenth (the
// bubble: by more than a tenth of the step).
std::vector<std::string> missed_predictions(const TrainSummary& summary);
// For a progress line: the largest load / average over all layers, and the fraction of choices dropped; empty
// without experts.
std::string expert_note(const std::vector<ExpertLoad>& loads);
// A progress line of at most `columns`; the learning rate and other details are left out if they do not fit.
// `seconds_left`: until the last step.
std::string step_line(const StepRecord& record, std::int64_t last_step, double seconds_left, int columns);
// One line per layer; empty without experts.
std::string expert_table(const std::vector<ExpertLoad>& loads);
// The histogram as bars.
std::string staleness_table(const AsynchronousSummary& summary);

}  // namespace echelon
