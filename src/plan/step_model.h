// Seconds and bytes of a step, for any plan of a workload: layers are priced by shape, the schedule is
// simulated with these times, and data-parallel communication and the optimizer are added.
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

// Where the seconds of a step go, on the pipeline rank that waits least. The parts add up to the step.
struct StepParts {
  double compute = 0, tp_exposed = 0, pp_bubble = 0, dp_exposed = 0, cp_exposed = 0, ep_exposed = 0,
         host_exposed = 0, optimizer = 0, other = 0;

  double total() const {
    return compute + tp_exposed + pp_bubble + dp_exposed + cp_exposed + ep_exposed + host_exposed +
           optimizer + other;
  }
};

// Bytes sent along each axis in a step, by the rank that sends most along it.
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
  // The terms of the memory count. Empty for this trainer, whose memory is computed exactly instead.
  std::vector<MemoryTerm> memory_terms;
  std::vector<std::int64_t> layers;  // of each stage
  AxisBytes traffic;
  // With offloading, of the rank with most: bytes that it keeps on its host, and bytes that cross the link to
  // the host in a step, both ways. And the seconds of the step that are due to host and link.
  double host_bytes = 0, host_traffic = 0, host_seconds = 0;
  SimulationCosts costs;  // of its schedule
  std::optional<PackedAttention> documents{};  // if sequences are packed from documents
};

// What is computed of a plan to decide whether to prune it.
struct Outlook {
  double seconds = 0;  // a lower bound of the step's time
  double bytes = 0;    // of the pipeline rank with most
  int rank = 0;
  double in_flight = 0;  // on that rank
};

// From where on an outlook need not be exact: beyond both of its bounds of bytes, and beyond the seconds, it
// may be any number that is beyond them too, and no more than the exact one.
struct Enough {
  double bytes = 1e300, seconds = 1e300;
};

class StepModel {
 public:
  // Other models may use the same shelf, in the same thread.
  explicit StepModel(Workload work, std::shared_ptr<ScheduleShelf> shelf = std::make_shared<ScheduleShelf>());
  StepModel(const StepModel&) = delete;
  StepModel& operator=(const StepModel&) = delete;

  const Workload& workload() const { return work_; }
  // How much of a device's memory a plan may use.
  double usable_bytes() const { return work_.machine.memory_bytes - work_.machine.reserved_bytes; }

  // See Stages.
  std::string schedule_problem(const Plan& c) { return stages_.schedule_problem(c); }
  bool splits_evenly(const Plan& c) { return stages_.splits_evenly(c); }
  // A lower bound of the step's time for this mesh, micro-batch and recomputation, with any schedule, split
  // and sharding: the model's passes divided evenly over the pipeline.
  double least_seconds(const Plan& c);
  // The same for its schedule: with any split and sharding.
  double least_scheduled_seconds(const Plan& c);
  // A lower bound of what ranks of such plans hold: a layer's backward pass at work.
  double least_at_work(const Plan& c);
  // Memory as rank_bytes() counts it, and a lower bound of the seconds: what the busiest rank computes, with
  // the passes that must come before and after it. If the memory exceeds `most_bytes`, only the memory is
  // computed.
  Outlook outlook(const Plan& c, double most_bytes = 1e300, const Enough& enough = {});
  // Recompute::none, and the kinds of recomputation that keep less, for the workload's model.
  std::vector<Recompute> recompute_kinds() const;
  // For each pipeline rank, the fastest kind with which it holds at most its `most_bytes`; ranks that run the
  // same stages get the same. One rank's choice changes the memory of others only through a split of layers
  // by cost, for which this iterates. No value if some rank has no such kind.
  std::optional<PipelineRecompute> fitting_recompute(Plan c, const std::vector<Recompute>& kinds,
                                                     const std::vector<double>& most_bytes);
  // Whether this rank has such a kind; without it there is none for all ranks.
  bool may_fit(const Plan& c, const std::vector<Recompute>& kinds, std::size_t rank, double most_bytes);
  // Bytes that the rank with most keeps on its host.
  double kept_on_host(const Plan& c);
  // Bytes of each pipeline rank, as outlook() counts them.
  std::vector<double> rank_bytes(const Plan& c);
  // A lower bound of what the rank with most holds, for this trainer, whose passes hold other values than
  // those counted.
  double least_bytes(const Plan& c);
  // The same from exact results so far: a rank holds at least as much as one with the same passes and layers
  // that has no more of them in flight. 0 if there is no such result.
  double least_as_walked(const Plan& c);
  // Everything; simulates the plan's schedule.
  Estimate estimate(const Plan& c);
  // The two halves of estimate(): all but the memory, and the memory. If a rank is found to exceed
  // `most_bytes`, only its memory is computed.
  Estimate estimate_seconds(const Plan& c);
  void add_memory(Estimate& e, double most_bytes = 1e300);
  // For a plan of this trainer with a rank that holds more than `most_bytes`: how much the formulas may count
  // for each rank so that it likely holds no more than that.
  std::vector<double> room(const Plan& c, double most_bytes);
  // The schedule's timeline as the estimate simulates it, over one step or two (two_steps()).
  Timeline timeline(const Plan& c, int steps = 1);
  // Bytes that the passes of each pipeline rank keep over that timeline. The maximum is part of the
  // estimate's activations; the rest of these is temporary inside a pass.
  std::vector<HeldCurve> activations_over_time(const Estimate& e, const Timeline& timeline);

 private:
  double least_passes(const Plan& c, bool hides_exchanges);
  struct WalkedRank {
    std::size_t rank = 0;
    RankShare share;
    double bytes = 0;
  };
  struct Ends {
    std::vector<double> of_rank;  // seconds at which its last instruction ends
    double bubble_fraction = 0;
  };
  double rank_bytes(const Plan& c, const StageHoldings& holdings, std::size_t rank) const;
  const Ends& simulated(const Plan& c, const SimulationCosts& costs);
  // Adds what a step takes besides its ranks' work: stragglers among nodes, and a constant.
  double whole_step(const Plan& c, double seconds) const;
  AxisBytes most_traffic(const Plan& c);
  double flops_per_token(double keys);
  // What a rank's activations do on the host in a step, by formula.
  HostActivations counted_activations(const Plan& c, std::size_t rank);
  // Adds what a rank has on its host, including these activations.
  void add_host(Estimate& e, std::size_t rank, const HostActivations& activations);

  Workload work_;
  Stages stages_;
  WalkedMemory walked_;
  std::map<std::string, std::vector<WalkedRank>> as_walked_;  // by passes_key()
  std::int64_t num_parameters_;
  std::optional<std::pair<double, double>> flops_;  // per token, for a token that sees this many keys
  std::deque<std::pair<Plan, Ends>> simulated_;     // the most recent ones, newest first
};

}  // namespace echelon
