// The life of a run: what its steps come to over all its tokens, and what failures add.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/step_model.h"

namespace echelon {

// What interrupts a run. A device that fails stops all of them; a spare takes its place.
struct Failures {
  double device_mtbf_seconds = 0;  // mean time between failures of one device; 0: none fails
  double restart_seconds = 0;      // from a failure until the first step is run again
  double save_seconds = 0;         // that a checkpoint halts training
  // From then until the checkpoint can be read: a failure before that goes back to the one before. An
  // asynchronous save halts for a moment and takes long to write.
  double write_seconds = 0;
  std::optional<int> spares{};  // no value: there is always one
  double repair_seconds = 0;    // until a failed device is a spare

  // Of a run on `gpus`.
  double mtbf_seconds(std::int64_t gpus) const { return device_mtbf_seconds / static_cast<double>(gpus); }
};

// Throws RequestError naming the flag of `plan` unless a run could meet these.
void validate(const Failures& failures, std::int64_t gpus);

// Seconds of work between two checkpoints with which a run ends first: Daly 2006, equation 37; no less than
// one takes to write.
double best_checkpoint_seconds(const Failures& failures, std::int64_t gpus);

// The part of the time that is work which counts, where there is always a spare. Daly 2006, equation 20; a
// checkpoint that is not yet written lengthens a restart by as much.
double expected_goodput(const Failures& failures, std::int64_t gpus, double checkpoint_seconds);

struct SimulatedRun {
  double goodput = 0;
  std::int64_t failures = 0;
  double waited_seconds = 0;  // for a device, as all spares were in repair
  double seconds = 0;         // that it took
};

// Failure by failure, over `seconds`; the devices that run fail independently of each other and of their age.
// The same seed gives the same run.
SimulatedRun simulate_run(const Failures& failures, std::int64_t gpus, double checkpoint_seconds,
                          double seconds, std::uint64_t seed);

// Until so much work is done, from a start with all spares; or `most_seconds`, if that comes first.
SimulatedRun simulate_work(const Failures& failures, std::int64_t gpus, double checkpoint_seconds,
                           double work_seconds, double most_seconds, std::uint64_t seed);

struct RunRequest {
  double tokens = 0;
  double price = 0;  // of a device for an hour; 0: not asked
  Failures failures{};
};

// What a plan's steps come to.
struct RunCost {
  std::int64_t steps = 0;
  double training_seconds = 0;                  // were nothing to fail
  double goodput = 1;                           // simulated where spares can run out, else expected
  double checkpoint_seconds = 0, failures = 0;  // between two; how many are expected
  double wall_seconds = 0;
  double gpu_hours = 0;  // over the wall time; spares count
  double money = 0;
  double joules = 0;  // of the devices that run, at their design power; 0: not known
};
RunCost run_cost(const Estimate& estimate, const Workload& work, const RunRequest& request);
// In words, a line each.
std::string run_text(const RunCost& cost, const RunRequest& request);

}  // namespace echelon
