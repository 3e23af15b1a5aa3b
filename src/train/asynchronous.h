// Data-parallel training with a parameter server (parallel/parameter_server.h): what workers and servers do
// from the first batch to the last.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "parallel/parameter_server.h"
#include "train/trainer.h"

namespace echelon {

struct AsynchronousOptions {
  // Bound on staleness, in batches of a worker; empty: no bound.
  std::optional<std::int64_t> staleness;
  int servers = 1;
};

// RequestError if the plan has more than data parallelism, or the options are out of range.
void refuse_asynchronous(const Plan& plan, const AsynchronousOptions& options);

// The number of all ranks. The workers are the ranks of the plan's mesh; the servers come after them.
int num_ranks(const Plan& plan, const std::optional<AsynchronousOptions>& options);
// The plan by which servers shard the parameters and their state: ZeRO 3 over the servers.
Plan server_plan(const Plan& plan, int servers);

// What a server holds, except for a few sums (category other), and what the first worker sends for one batch.
Memory predict_server_memory(const Plan& plan, const PipelineLayout& pipeline,
                             const AsynchronousOptions& options, int server);
Traffic predict_worker_traffic(const Plan& plan, const PipelineLayout& pipeline,
                               const AsynchronousOptions& options);

// An artificially slow worker, for demonstrations and tests: after the passes of a step it sleeps (factor -
// 1) times as long as they took.
struct Straggler {
  int rank = 0;
  double factor = 1;
};

// The factor by which a step is longer, on average over `steps`, than with equally fast workers, if one is
// `factor` times slower and workers wait only for its batches and the bound. With a bound s the others get s
// batches ahead of it once and then keep its pace; without a bound they do the work that it does not.
double straggler_slowdown(double factor, int workers, std::int64_t steps, const AsynchronousOptions& options);

// Steps [first, last); each worker gets equally many batches if all are equally fast.
struct AsynchronousRun {
  AsynchronousOptions options;
  std::int64_t first_step = 0, last_step = 1;
};

// The group of all workers and servers.
std::unique_ptr<Communicator> join_all(const Rank& rank, int workers, int servers);

// Runs a worker. At the end its trainer has the final values, the same on every worker. `after_batch` may be
// empty. RunError naming the first tensor if a gradient is not finite.
void run_worker(Communicator& all, Trainer& trainer, const AsynchronousRun& run, const SampleSource& samples,
                const std::function<void()>& after_batch);

// The updates that make up a step: one if s = 0, else one for each worker.
struct ServedStep {
  StepResult result;           // loss: mean over target tokens; norm: mean over pushes
  std::int64_t sequences = 0;  // computed by workers
  double seconds = 0;          // since the previous step
};

// A server: its rank in the mesh of servers, its shard, and its counts.
class ParameterServerRank {
 public:
  // `rank`: in the mesh of server_plan(), whose rank 0 is world rank `workers`.
  ParameterServerRank(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer,
                      std::uint64_t seed, const AsynchronousRun& run,
                      FirstValues first_values = FirstValues::drawn);

  const ParameterStore& parameters() const { return parameters_; }
  // Optimizer steps that the parameters have had so far.
  std::int64_t updates() const { return updates_; }
  void resume(std::int64_t updates) { updates_ = updates; }

  // Serves until every worker has finished; `on_step` is called on every server. Throws as ParameterServer
  // does.
  StalenessMeasures serve(Communicator& all, const std::function<void(const ServedStep&)>& on_step);

 private:
  void update(const std::vector<Push>& pushes, int worker);

  const Rank& rank_;
  Plan plan_;
  OptimizerOptions optimizer_;
  AsynchronousRun run_;
  Plan server_plan_;
  PipelineLayout pipeline_;
  ParameterStore parameters_;
  std::int64_t updates_ = 0;
  std::int64_t pushes_ = 0;  // received in this run
  ServedStep step_;          // in progress
  double num_targets_ = 0;
  Clock::time_point step_begin_;
  std::function<void(const ServedStep&)> on_step_;
};

}  // namespace echelon
