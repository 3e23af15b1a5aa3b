// A Communicator whose collectives use the algorithms of collectives.h.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace echelon {

// Which algorithms collectives use.
enum class Collectives {
  direct,            // the backend's own
  ring,              // all_reduce, all_gather, reduce_scatter: rings
  halving_doubling,  // all_reduce: Rabenseifner's; the rest as in ring
  automatic,         // all_reduce: the fastest for its size; the rest as in ring
  nccl,              // the device vendor's library, in device memory (device_groups.h)
};
// Built on messages, all_to_all is pairwise, broadcast a binomial tree and barrier dissemination.

const char* collectives_name(Collectives collectives);
// RequestError naming `field` and the legal values.
Collectives parse_collectives(const std::string& text, const std::string& field);

// Wraps two communicators of the same group: `messages` carries the caller's sends and receives, `channels`
// those of the algorithms, so that the two never share a channel. Not for `direct` and `nccl`.
//
// A collective blocks inside the call: its Pending is already finished. On a device, the host blocks there
// for the other ranks' calls, and the rank's stream for the work. So ranks that share two groups must call
// the collectives of both in a consistent order, as with any blocking collectives. Sends and receives never
// block.
std::unique_ptr<Communicator> with_algorithms(std::unique_ptr<Communicator> messages,
                                              std::unique_ptr<Communicator> channels,
                                              Collectives collectives);

// The algorithm that `automatic` uses for `bytes` over n ranks.
enum class AllReduceAlgorithm { ring, halving_doubling, recursive_doubling };
AllReduceAlgorithm fastest_all_reduce(int n, std::int64_t bytes);

}  // namespace echelon
