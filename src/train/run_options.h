// How the ranks of a job run: as threads or processes, and on which devices.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/algorithm_communicator.h"
#include "comm/process_world.h"
#include "spec/plan.h"
#include "tensor/device_driver.h"

namespace echelon {

struct RunOptions {
  int threads_per_rank = 1;
  std::chrono::milliseconds timeout{60'000};  // of any wait for another rank
  Collectives collectives = Collectives::direct;
  // The driver of the devices that ranks take in turn; null: they compute on the CPU. Outlives the run.
  std::shared_ptr<DeviceDriver> driver{};
  Device device() const { return driver == nullptr ? Device::cpu : Device::cuda; }
  // Replays the passes of training as CUDA graphs (train/pass_graphs.h).
  bool cuda_graphs = false;
  std::int64_t memory_limit = 0;  // limit of a rank's arena in bytes; 0: none
  // The processes, each of which is a rank; they outlive the run. Null: ranks are threads of this process.
  ProcessWorld* processes = nullptr;
  // For processes: gather_device_ids().
  std::vector<std::string> device_ids{};
  // For thread ranks; processes have their own.
  FailureHooks failure_hooks{};
  Time time{};

  // Whether rank 0 lives in this process.
  bool leads() const { return processes == nullptr || processes->rank() == 0; }
  // The index of the device on which a rank of this process computes: thread ranks take devices in turn, and
  // so do the processes of a node.
  int device_of(int rank) const;
  // The device of a thread that is no rank; of a process, its own.
  int own_device(int thread) const { return device_of(processes != nullptr ? processes->rank() : thread); }
  // Of a job of `ranks` ranks, those on this machine.
  int ranks_here(int ranks) const { return processes != nullptr ? processes->ranks_on_this_node() : ranks; }
  // With a driver, for a job of `ranks` ranks: the devices on which ranks of this process compute; over all
  // ranks, the most on one device, and the number of devices in use.
  std::vector<int> own_devices(int ranks) const;
  int most_ranks_on_a_device(int ranks) const;
  int devices_in_use(int ranks) const;
  // The ranks of the job on the device with this index in the process of `rank`.
  std::vector<int> ranks_on(int device, int rank, int ranks) const;
};

// Collective over the processes of a job: the id of each rank's device. A process may see only its own device
// of the node, so that each has index 0. Empty texts without a driver.
std::vector<std::string> gather_device_ids(ProcessWorld& processes, DeviceDriver* driver);

// Wraps body(rank) so that failures due to a lost device name the ranks that were on it.
std::function<void(int rank)> naming_lost_ranks(const RunOptions& run, int ranks,
                                                std::function<void(int rank)> body);

// RequestError if the plan needs more than this machine has, or the fullest of its devices: `bytes`, divided
// evenly among the ranks here.
void refuse_beyond_memory(const Plan& plan, double bytes, const RunOptions& run);

}  // namespace echelon
