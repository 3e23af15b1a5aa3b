// Seconds and bytes of a step of any plan of a workload: layers priced by shape, the schedule
// simulated with these times, data-parallel traffic, optimizer.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/stages.h"
#include "plan/walked_memory.h"
#include "plan/workload.h"
#include "schedule/over_time.h"
#include "schedule/simulate.h"
#include "spec/memory.h"

namespace echelon {

// Where the seconds of a step go, on the pipeline rank that ends last. They add up to the step.
struct StepParts {
  double compute = 0, tp_exposed = 0, pp_bubble = 0, dp_exposed = 0, cp_exposed = 0, ep_exposed = 0,
         host_exposed = 0, optimizer = 0, other = 0;
};

// Sent along each axis in a step, by the rank that sends most along it.
struct AxisBytes {
  double dp = 0, tp = 0, pp = 0, cp = 0, ep = 0;
};

struct Estimate {
  Plan plan;
  std::int64_t microbatches = 1;
  double seconds = 0, low = 0, high = 0;  // of a step, to 12 digits; the 10th and 90th percentile
  double bubble_fraction = 0;             // idle time of a pipeline rank over the pipeline's makespan
  double tokens_per_second_per_gpu = 0, model_tflops_per_gpu = 0, mfu = 0;
  StepParts parts;
  Memory memory;                     // of the rank with most
  int memory_rank = 0;               // which pipeline rank that is
  std::vector<Memory> rank_memory;   // of each pipeline rank
  // How the memory is counted; of this trainer it is walked, and nothing stands here.
  std::vector<MemoryTerm> memory_terms;
  std::vector<std::int64_t> layers;  // of each stage
  AxisBytes traffic;
  // With offloading: what a rank keeps on its host, what goes over the link to it in a step, both ways, of
  // the rank with most; and the seconds of the step that host and link take.
  double host_bytes = 0, host_traffic = 0, host_seconds = 0;
  SimulationCosts costs;  // of its schedule
  std::optional<PackedAttention> documents{};  // where sequences are packed of them
};

// What the pruning path finds out about a plan.
struct Outlook {
  double seconds = 0;  // no step takes less
  double bytes = 0;    // of the pipeline rank with most
  int rank = 0;
  double in_flight = 0;  // there
};

class StepModel {
 public:
  // The shelf may be one that other models have, in the same thread.
  explicit StepModel(Workload work, std::shared_ptr<ScheduleShelf> shelf = std::make_shared<ScheduleShelf>());
  StepModel(const StepModel&) = delete;
  StepModel& operator=(const StepModel&) = delete;

  const Workload& workload() const { return work_; }
  // Memory that a plan may use of a device.
  double usable_bytes() const { return work_.machine.memory_bytes - work_.machine.reserved_bytes; }

  // As those of Stages.
  std::string schedule_problem(const Plan& c) { return stages_.schedule_problem(c); }
  bool splits_evenly(const Plan& c) { return stages_.splits_evenly(c); }
  // No step of this mesh, micro-batch and recomputation takes less, whatever its schedule, split and
  // sharding: the model's passes shared out evenly over the pipeline.
  double least_seconds(const Plan& c);
  // No rank of its plans holds less: a layer's backward pass at work.
  double least_at_work(const Plan& c);
  // Exact memory, and a bound on the seconds: what the busiest rank computes, with the passes that must come
  // before and after it.
  // Where the memory is above `most_bytes` only that is found out.
  Outlook outlook(const Plan& c, double most_bytes = 1e300);
  // Kinds of recomputation that keep less than others of the workload's model, for less time.
  std::vector<Recompute> recompute_kinds() const;
  // For each pipeline rank the one that takes it least time of those with which it holds no more than its
  // `most_bytes`; ranks that run the same stages have the same. What one chooses changes no other's memory
  // but through a split of layers by cost, which follows. No value where some rank has none.
  std::optional<PipelineRecompute> fitting_recompute(Plan c, const std::vector<Recompute>& kinds,
                                                     const std::vector<double>& most_bytes);
  // Whether there is one of them for this rank, without which there is none for all.
  bool may_fit(const Plan& c, const std::vector<Recompute>& kinds, std::size_t rank, double most_bytes);
  // What the rank with most keeps on its host.
  double kept_on_host(const Plan& c);
  // Of each pipeline rank, as outlook() counts them.
  std::vector<double> rank_bytes(const Plan& c);
  // What the rank with most holds at least: of this trainer, whose passes hold other values than are counted.
  double least_bytes(const Plan& c);
  // The same by what was walked: no rank holds less than one of the same passes and layers that has no more
  // of them in flight. 0 where nothing says so.
  double least_as_walked(const Plan& c);
  // The whole: its schedule simulated.
  Estimate estimate(const Plan& c);
  // Its two halves: all but the memory, and that. Where it is found to be above `most_bytes` on some rank,
  // what that one holds is all that is found out.
  Estimate estimate_seconds(const Plan& c);
  void add_memory(Estimate& e, double most_bytes = 1e300);
  // Of a plan of this trainer that has a rank which holds more than `most_bytes`: what each rank may be
  // counted to hold so that it is likely to hold no more than that.
  std::vector<double> room(const Plan& c, double most_bytes);
  // The schedule's timeline as the estimate simulates it, over one step or two (two_steps()).
  Timeline timeline(const Plan& c, int steps = 1);
  // What the passes of each pipeline rank keep over that step, in bytes. The most of it is part of the
  // activations that the estimate has; the rest of these comes and goes inside a pass.
  std::vector<HeldCurve> activations_over_time(const Estimate& e, const Timeline& timeline);

 private:
  struct WalkedRank {
    std::size_t rank = 0;
    RankShare share;
    double bytes = 0;
  };
  struct Ends {
    std::vector<double> of_rank;  // seconds at which its last instruction ends
    double bubble_fraction = 0;
  };
  const Ends& simulated(const Plan& c, const SimulationCosts& costs);
  // Factors of the step time between which 8 of 10 measurements of such a configuration lie.
  double whole_step(const Plan& c, double seconds) const;
  AxisBytes most_traffic(const Plan& c);
  double flops_per_token(double keys);
  // What a rank's activations do on the host in a step, as formulas count it.
  HostActivations counted_activations(const Plan& c, std::size_t rank);
  // What a rank has on its host, whose activations do this there.
  void add_host(Estimate& e, std::size_t rank, const HostActivations& activations);

  Workload work_;
  Stages stages_;
  WalkedMemory walked_;
  std::map<std::string, std::vector<WalkedRank>> as_walked_;  // by what their passes are made of
  std::int64_t num_parameters_;
  std::optional<std::pair<double, double>> flops_;  // of a token that sees so many keys
  std::deque<std::pair<Plan, Ends>> simulated_;  // the last ones, the newest first
};

}  // namespace echelon
