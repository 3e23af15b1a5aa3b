// Seconds and bytes of a step of any configuration of a workload: layers priced by shape, the schedule
// simulated with these times, data-parallel traffic, optimizer.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "plan/configuration.h"
#include "plan/stages.h"
#include "schedule/simulate.h"
#include "spec/memory.h"

namespace echelon {

// Where the seconds of a step go, on the pipeline rank that ends last. They add up to the step.
struct StepParts {
  double compute = 0, tp_exposed = 0, pp_bubble = 0, dp_exposed = 0, cp_exposed = 0, ep_exposed = 0,
         optimizer = 0, other = 0;
};

// Sent along each axis in a step, by the rank that sends most along it.
struct AxisBytes {
  double dp = 0, tp = 0, pp = 0, cp = 0, ep = 0;
};

struct Estimate {
  Configuration configuration;
  std::int64_t microbatches = 1;
  double seconds = 0, low = 0, high = 0;  // of a step, to 12 digits; the 10th and 90th percentile
  double bubble_fraction = 0;             // idle time of a pipeline rank over the pipeline's makespan
  double tokens_per_second_per_gpu = 0, model_tflops_per_gpu = 0, mfu = 0;
  StepParts parts;
  Memory memory;                     // of the rank with most
  int memory_rank = 0;               // which pipeline rank that is
  std::vector<Memory> rank_memory;   // of each pipeline rank
  std::vector<std::int64_t> layers;  // of each stage
  AxisBytes traffic;
  SimulationCosts costs;  // of its schedule
};

// What the pruning path finds out about a configuration.
struct Outlook {
  double seconds = 0;  // no step takes less
  double bytes = 0;    // of the pipeline rank with most
  int rank = 0;
  double in_flight = 0;  // there
};

class StepModel {
 public:
  explicit StepModel(Workload work);
  StepModel(const StepModel&) = delete;
  StepModel& operator=(const StepModel&) = delete;

  const Workload& workload() const { return work_; }
  // Memory that a plan may use of a device.
  double usable_bytes() const { return work_.machine.memory_bytes - work_.machine.reserved_bytes; }

  // As those of Stages.
  std::string schedule_problem(const Configuration& c) { return stages_.schedule_problem(c); }
  bool splits_evenly(const Configuration& c) { return stages_.splits_evenly(c); }
  // No step of this mesh, micro-batch and recomputation takes less, whatever its schedule, split and
  // sharding: the model's passes shared out evenly over the pipeline.
  double least_seconds(const Configuration& c);
  // Exact memory, and a bound on the seconds: what the busiest rank computes, with the passes that must come
  // before and after it.
  // Where the memory is above `most_bytes` only that is found out.
  Outlook outlook(const Configuration& c, double most_bytes = 1e300);
  // The whole: its schedule simulated.
  Estimate estimate(const Configuration& c);
  // Its two halves: all but the memory, and that. Where it is found to be above `most_bytes` on some rank,
  // what that one holds is all that is found out.
  Estimate estimate_seconds(const Configuration& c);
  void add_memory(Estimate& e, double most_bytes = 1e300);
  // The schedule's timeline as the estimate simulates it.
  Timeline timeline(const Configuration& c);

 private:
  struct Ends {
    std::vector<double> of_rank;  // seconds at which its last instruction ends
    double bubble_fraction = 0;
  };
  const Ends& simulated(const Configuration& c, const SimulationCosts& costs);
  // Factors of the step time between which 8 of 10 measurements of such a configuration lie.
  std::pair<double, double> interval(const Configuration& c) const;
  double whole_step(const Configuration& c, double seconds) const;
  AxisBytes most_traffic(const Configuration& c);

  Workload work_;
  Stages stages_;
  double flops_per_step_ = 0;
  Configuration last_simulated_;
  Ends last_ends_;
};

}  // namespace echelon
