// How the ranks of a job are run: as threads or processes, and on which devices.
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

// How ranks are run.
struct RunOptions {
  int threads_per_rank = 1;
  std::chrono::milliseconds timeout{60'000};  // of any wait for another rank
  Collectives collectives = Collectives::direct;
  // Of the devices that ranks take in turn; null: they compute on the cpu. Outlives the run.
  std::shared_ptr<DeviceDriver> driver{};
  Device device() const { return driver == nullptr ? Device::cpu : Device::cuda; }
  // The passes of training are replayed as CUDA graphs (train/pass_graphs.h).
  bool cuda_graphs = false;
  std::int64_t memory_limit = 0;  // bytes that a rank's arena may hold; 0: no limit
  // Each rank is one of these, and outlives the run; null: ranks are threads of this process.
  ProcessWorld* processes = nullptr;
  // Of processes: gather_device_ids().
  std::vector<std::string> device_ids{};
  // Of thread ranks; processes have their own.
  FailureHooks failure_hooks{};
  Time time{};

  // Whether rank 0 lives in this process.
  bool leads() const { return processes == nullptr || processes->rank() == 0; }
  // The number of the device that a rank of this process computes on: thread ranks take them in turn, and so
  // do the processes of a node.
  int device_of(int rank) const;
  // That a thread beside the ranks takes: of a process, its own.
  int own_device(int thread) const { return device_of(processes != nullptr ? processes->rank() : thread); }
  // Of a job of so many ranks: those on this machine.
  int ranks_here(int ranks) const { return processes != nullptr ? processes->ranks_on_this_node() : ranks; }
  // With a driver. Of a job of so many ranks: the numbers of the devices that those of this process compute
  // on; of all its ranks, on the device that has most of them, and devices that have any.
  std::vector<int> own_devices(int ranks) const;
  int most_ranks_on_a_device(int ranks) const;
  int devices_in_use(int ranks) const;
  // Ranks of the job that compute on the device of this number in the process of `rank`.
  std::vector<int> ranks_on(int device, int rank, int ranks) const;
};

// Collective over the processes of a job: the id of the device that each rank computes on. What a process
// sees of its node's devices may be its own alone, and the number of each 0. Empty text of what has no
// driver.
std::vector<std::string> gather_device_ids(ProcessWorld& processes, DeviceDriver* driver);

// Of a job of so many ranks: body(rank), whose failures by a lost device say which ranks were on it.
std::function<void(int rank)> naming_lost_ranks(const RunOptions& run, int ranks,
                                                std::function<void(int rank)> body);

// RequestError where the plan needs more bytes on this machine, shared out evenly over the ranks here, than
// it or the fullest of its devices has.
void refuse_beyond_memory(const Plan& plan, double bytes, const RunOptions& run);

}  // namespace echelon
