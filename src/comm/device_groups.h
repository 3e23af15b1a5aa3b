// Groups of ranks on devices whose collectives use the vendor's library (NCCL; tensor/device_collectives.h)
// instead of the world's own.
//
// Before queueing a collective, its ranks compare their calls over the world's communicator, and the host
// waits for that. So a rank that disagrees or does not come fails as anywhere else, and a collective is
// queued only if every rank queues it. The library groups the sums: results are within the bounds of
// communicator.h, but not its bits. Messages, barriers and buffers in host memory still use the world.
//
// Ranks that share several groups must call the collectives of all of them in a consistent order, as with any
// blocking collectives (algorithm_communicator.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"
#include "tensor/device_collectives.h"

namespace echelon {

// The device groups of one rank. Outlives their communicators.
class DeviceGroups {
 public:
  // `rank`: the world rank.
  DeviceGroups(World& world, int rank, DeviceCollectives& library);
  ~DeviceGroups();
  DeviceGroups(const DeviceGroups&) = delete;
  DeviceGroups& operator=(const DeviceGroups&) = delete;

  // `inner`: the communicator of the same group (`ranks` of the world) from the world.
  std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> inner, const std::string& name,
                                     const std::vector<int>& ranks);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace echelon
