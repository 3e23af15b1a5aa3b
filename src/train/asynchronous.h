// Data-parallel training around a parameter server (parallel/parameter_server.h): what workers and servers do
// from the first batch to the last.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "parallel/parameter_server.h"
#include "train/trainer.h"

namespace echelon {

struct AsynchronousOptions {
  std::optional<std::int64_t> staleness;  // bound, in batches of a worker; no value: none
  int servers = 1;
};

// RequestError where the plan has more than data parallelism, or the options are out of range.
void refuse_asynchronous(const Plan& plan, const AsynchronousOptions& options);

// The workers are the ranks of the plan's mesh; the servers come after them.
int num_ranks(const Plan& plan, const std::optional<AsynchronousOptions>& options);
// How the servers cut the parameters and what belongs to them: as ZeRO 3 would over so many ranks.
Plan server_plan(const Plan& plan, int servers);

// What a server holds, but for a few sums (category other), and what the first worker sends for one batch.
Memory predict_server_memory(const Plan& plan, const PipelineLayout& pipeline,
                             const AsynchronousOptions& options, int server);
Traffic predict_worker_traffic(const Plan& plan, const PipelineLayout& pipeline,
                               const AsynchronousOptions& options);

// A worker made slow on purpose, to be seen or tested: after the passes of a step it sleeps (factor - 1)
// times as long as they took.
struct Straggler {
  int rank = 0;
  double factor = 1;
};

// How many times longer a step is, on average over so many, than if all workers were equally fast, where one
// is `factor` times slower and nothing but its batches and the bound is waited for. With a bound s the
// others run s batches ahead of it once and then keep its pace; without one they do what it does not.
double straggler_slowdown(double factor, int workers, std::int64_t steps, const AsynchronousOptions& options);

// Steps [first, last): as many batches for each worker, if all are equally fast.
struct AsynchronousRun {
  AsynchronousOptions options;
  std::int64_t first_step = 0, last_step = 1;
};

// The group of all workers and servers.
std::unique_ptr<Communicator> join_all(const Rank& rank, int workers, int servers);

// A worker's part; the trainer ends with the final values, the same on every worker. `after_batch` may be
// empty. RunError naming the first tensor when a gradient is not finite.
void run_worker(Communicator& all, Trainer& trainer, const AsynchronousRun& run, const SampleSource& samples,
                const std::function<void()>& after_batch);

// As many updates as make a step: one where s = 0, else one for each worker.
struct ServedStep {
  StepResult result;           // the loss is the mean over the target tokens, the norm the mean over pushes
  std::int64_t sequences = 0;  // that workers computed
  double seconds = 0;          // since the one before
};

// A server's rank of a mesh of servers, its shard, and what it has counted.
class ParameterServerRank {
 public:
  // `rank`: of server_plan()'s mesh, whose rank 0 is world rank `workers`.
  ParameterServerRank(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer,
                      std::uint64_t seed, const AsynchronousRun& run,
                      FirstValues first_values = FirstValues::drawn);

  const ParameterStore& parameters() const { return parameters_; }
  // Optimizer steps that the parameters have had.
  std::int64_t updates() const { return updates_; }
  void resume(std::int64_t updates) { updates_ = updates; }

  // Serves until every worker has finished; `on_step` is called on every server. What ParameterServer throws.
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
  std::int64_t pushes_ = 0;  // taken by this run
  ServedStep step_;          // under way
  double num_targets_ = 0;
  Clock::time_point step_begin_;
  std::function<void(const ServedStep&)> on_step_;
};

}  // namespace echelon
