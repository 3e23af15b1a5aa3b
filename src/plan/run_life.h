// A whole training run: the time of its steps over all tokens, and what failures add.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/step_model.h"

namespace echelon {

// What interrupts a run. A device that fails stops all devices; a spare replaces it.
struct Failures {
  double device_mtbf_seconds = 0;  // mean time between failures of one device; 0: none fails
  double restart_seconds = 0;      // from a failure until the first step runs again
  double save_seconds = 0;         // how long a checkpoint halts training
  // From then until the checkpoint can be read: a failure before that goes back to the checkpoint before. An
  // asynchronous save halts training for a moment and takes long to write.
  double write_seconds = 0;
  std::optional<int> spares{};  // no value: there is always a spare
  double repair_seconds = 0;    // until a failed device is a spare again

  // For a run on `gpus` devices.
  double mtbf_seconds(std::int64_t gpus) const { return device_mtbf_seconds / static_cast<double>(gpus); }
};

// RequestError naming the flag of `plan` if no run could have these values.
void validate(const Failures& failures, std::int64_t gpus);

// Seconds of work between two checkpoints with which a run ends earliest: Daly 2006, equation 37; at least
// the time to write one.
double best_checkpoint_seconds(const Failures& failures, std::int64_t gpus);

// The fraction of the time that is useful work, if there is always a spare. Daly 2006, equation 20; the time
// to write a checkpoint lengthens each restart.
double expected_goodput(const Failures& failures, std::int64_t gpus, double checkpoint_seconds);

struct SimulatedRun {
  double goodput = 0;
  std::int64_t failures = 0;
  double waited_seconds = 0;  // for a device, while all spares were in repair
  double seconds = 0;         // length of the run
};

// Simulates `seconds`, failure by failure; running devices fail independently of each other and of their age.
// The same seed gives the same run.
SimulatedRun simulate_run(const Failures& failures, std::int64_t gpus, double checkpoint_seconds,
                          double seconds, std::uint64_t seed);

// Until this much work is done, starting with all spares; or until `most_seconds`, if that comes first.
SimulatedRun simulate_work(const Failures& failures, std::int64_t gpus, double checkpoint_seconds,
                           double work_seconds, double most_seconds, std::uint64_t seed);

struct RunRequest {
  double tokens = 0;
  double price = 0;  // of a device per hour; 0: not given
  Failures failures{};
};

// The cost of all of a plan's steps.
struct RunCost {
  std::int64_t steps = 0;
  double training_seconds = 0;                  // without failures
  double goodput = 1;                           // simulated if spares can run out, else expected
  double checkpoint_seconds = 0, failures = 0;  // between two checkpoints; expected number of failures
  double wall_seconds = 0;
  double gpu_hours = 0;  // over the wall time, including spares
  double money = 0;
  double joules = 0;  // of the running devices, at their design power; 0: unknown
  // The step's 10th and 90th percentile over its time: factors of all times here, money and energy, since
  // goodput hardly depends on how long a step takes.
  double low = 1, high = 1;
};
RunCost run_cost(const Estimate& estimate, const Workload& work, const RunRequest& request);
// In words, one line for each figure.
std::string run_text(const RunCost& cost, const RunRequest& request);

}  // namespace echelon
