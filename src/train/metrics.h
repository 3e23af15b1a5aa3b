// What a run measured, in the forms that command-line.md promises to programs.
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
  double imbalance = 0;         // load / average of the expert with most tokens
  double drop_rate = 0;         // of all choices
  double balance_loss = 0;      // of the router, z-loss included
  std::vector<double> tokens;   // sent to each expert
  std::vector<double> dropped;  // of those
};

struct StepRecord {
  std::int64_t step = 0;  // counts from 1
  double loss = 0, grad_norm = 0, lr = 0;
  std::int64_t tokens = 0;  // of this step, over all ranks
  double tokens_per_second = 0, mfu = 0, step_seconds = 0;
  std::string skipped{};            // why nothing was updated; empty: it was
  std::vector<ExpertLoad> experts;  // by layer; empty without experts
  double mtp_loss = 0;              // see StepResult
};

// Model FLOPs over the peak of the cores that compute. How fast these can be is known from below only: by the
// fastest that they have been seen at, which is a matrix product on an idle machine, and may be a step on one
// that was not idle when the products were made.
class Utilization {
 public:
  explicit Utilization(double peak_flops) : peak_flops_(peak_flops) {}
  double of(double flops) {
    was_exceeded_ = was_exceeded_ || flops > peak_flops_;
    raise(flops);
    return flops / peak_flops_;
  }
  void raise(double flops) { peak_flops_ = std::max(peak_flops_, flops); }
  // Whether something was faster than the peak that was measured.
  bool was_exceeded() const { return was_exceeded_; }
  double peak_flops() const { return peak_flops_; }

 private:
  double peak_flops_;
  bool was_exceeded_ = false;
};

// A run around parameter servers.
struct AsynchronousSummary {
  std::optional<std::int64_t> bound;  // no value: none
  // [n]: pushes of workers that were n batches ahead of the slowest when they pulled.
  std::vector<std::int64_t> histogram;
  double mean_updates_late = 0;  // optimizer steps between a push's pull and itself
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
  double peak_flops = 0;  // that MFU is of
  std::int64_t num_params = 0, trained_params = 0;
  Memory predicted_memory, measured_memory;     // peak of rank 0
  HostActivations predicted_host,
      measured_host;  // of rank 0: of a step, and the most of all; --offload activations
  Traffic predicted_traffic, measured_traffic;  // what rank 0 sends in one step
  // What predictions took for granted, and its traffic as it follows from what the data decided: equal to the
  // measured one.
  std::vector<Assumption> memory_assumptions, traffic_assumptions;
  Traffic traffic_by_data;
  Traffic measured_messages;        // what it sent for collectives by messages
  std::vector<ExpertLoad> experts;  // of the last step
  double validation_loss = -1;      // < 0: none
  std::string checkpoint;           // the last one written
  std::string fingerprint;          // of the last weights, where it was asked for
  double checkpoint_seconds = 0;    // the longest that training stood still for one
  bool complete = false;            // before its first step: the checkpoint to go on from has them all
  bool stopped = false;             // before its last step, as it was asked to
  std::int64_t checked_steps = 0;   // that were run a second time, to see whether they give the same bits
  double check_seconds = 0;         // that this took
  Traffic checked_traffic;          // what rank 0 sent for it
  std::int64_t corruptions = 0;     // that were found, and repaired
  std::int64_t skipped = 0;         // steps whose loss or gradient was not finite
  double predicted_bubble = 0, measured_bubble = 0;  // idle part of a pipeline rank's time, mean over ranks
  std::optional<GraphCounts> graphs;                 // where passes are replayed as graphs
  std::int64_t taken_back = 0;  // steps that were wrongly guessed, where the optimizer has no barrier
  std::optional<ParameterGather::Measures> gathers;  // ZeRO 3: rank 0 in the last step
  // Optimizer steps that gradients were late, at most, by pipeline rank; empty where the schedule flushes.
  std::vector<int> predicted_staleness, measured_staleness;
  std::optional<AsynchronousSummary> asynchronous;
  // The last step of the first pipeline (dp 0, tp 0), in seconds: as it ran, and its schedule simulated with
  // the times that its instructions took. Of a stream the last few steps.
  Timeline measured_timeline, simulated_timeline;
  // By rank of the job, servers behind the workers: the last steps, and what came behind them. Empty unless
  // asked for.
  std::vector<RankTimeline> rank_timelines;
};

// What silent corruption was found, and where (train/replica_check.h).
struct Corruption {
  std::int64_t step = 0, found_after = 0;  // count from 1
  std::vector<int> ranks;                  // whose fault it is; of a message its sender and receiver
  std::string what;                        // in words
  bool repaired = false;                   // the steps were run again, and the run goes on with what is right
};

// How long each rank worked, waits for others not counted, in the mean over some steps.
struct WorkSpread {
  std::int64_t first_step = 0, last_step = 0;
  std::vector<double> seconds;  // of a step, by rank
  int slowest() const;
};

std::string to_json(const WorkSpread& spread);
std::string to_json(const StepRecord& record);
std::string to_json(const TrainSummary& summary);
std::string evaluation_json(std::int64_t step, double validation_loss);
std::string to_json(const Corruption& corruption);
std::string fingerprint_json(std::int64_t step, const std::string& fingerprint);

// What activations do on the host; empty where they stay.
std::string offload_table(const char* first, const HostActivations& a, const char* second,
                          const HostActivations& b);
// {"parameters": n, ..., "total": n} and {"tp": {"all_reduce": bytes, ...}, ...}, for people: one aligned
// table each.
std::string memory_table(const std::string& title, const char* first, const Memory& a, const char* second,
                         const Memory& b);
std::string bytes_row(const std::string& name, std::int64_t first, std::int64_t second);  // of such a table
std::string traffic_table(const TrainSummary& summary);
// What the table above it took for granted, in words; empty: nothing.
std::string assumption_note(const std::vector<Assumption>& assumptions);
// A sentence for each of memory, traffic, step time and bubble whose prediction is off by more than a tenth
// (of the bubble: by more than a tenth of the step).
std::vector<std::string> missed_predictions(const TrainSummary& summary);
// For a progress line: the largest load / average of all layers, and the fraction of choices dropped;
// empty without experts.
std::string expert_note(const std::vector<ExpertLoad>& loads);
// A progress line of at most `columns`: where not all fits, the learning rate and the like are left out.
// `seconds_left`: until the last step.
std::string step_line(const StepRecord& record, std::int64_t last_step, double seconds_left, int columns);
// One line a layer; empty without experts.
std::string expert_table(const std::vector<ExpertLoad>& loads);
// The histogram as bars.
std::string staleness_table(const AsynchronousSummary& summary);

}  // namespace echelon
