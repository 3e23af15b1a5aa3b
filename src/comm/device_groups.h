// Groups of ranks on devices whose collectives are those of the vendor's library (NCCL;
// tensor/device_collectives.h), in place of the world's own.
//
// Before one is queued its ranks tell each other over the world's communicator what they were called for, and
// the host waits for that: so ranks that disagree, or one that does not come, fail as anywhere, and nothing
// is queued that not every rank queues. The sums are grouped by the library: within the bounds of
// communicator.h, and not its bits. Messages, barriers and what is in the host's memory stay the world's.
//
// Ranks that share several groups call the collectives of all of them in an order that suits all: as with any
// blocking collectives (algorithm_communicator.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"
#include "tensor/device_collectives.h"

namespace echelon {

// Those of one rank. Outlives their communicators.
class DeviceGroups {
 public:
  // World rank `rank`.
  DeviceGroups(World& world, int rank, DeviceCollectives& library);
  ~DeviceGroups();
  DeviceGroups(const DeviceGroups&) = delete;
  DeviceGroups& operator=(const DeviceGroups&) = delete;

  // `inner`: the same group (`ranks` of the world) as the world joined it.
  std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> inner, const std::string& name,
                                     const std::vector<int>& ranks);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace echelon
