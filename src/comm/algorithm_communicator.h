// A Communicator whose collectives are those of collectives.h.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace echelon {

// How collectives are done.
enum class Collectives {
  direct,            // the backend's own
  ring,              // all_reduce, all_gather, reduce_scatter: rings
  halving_doubling,  // all_reduce: Rabenseifner's; the rest as ring
  automatic,         // all_reduce: what should take least time at this size; the rest as ring
  nccl,              // those of the devices' library, in their memory (device_groups.h)
};
// By messages all_to_all is pairwise, broadcast a binomial tree and barrier dissemination.

const char* collectives_name(Collectives collectives);
// RequestError naming `field` and the legal values.
Collectives parse_collectives(const std::string& text, const std::string& field);

// The same group, twice: `messages` carries the caller's sends and receives, `channels` those of the
// algorithms, so that the two never meet on one channel. Not for direct and nccl.
//
// A collective waits inside the call: its Pending is finished. On a device the host waits there for the
// other ranks' calls, and the rank's stream for the work. So ranks that share two groups must call the
// collectives of both in an order that suits all of them, as with any blocking collectives; sends and
// receives never wait.
std::unique_ptr<Communicator> with_algorithms(std::unique_ptr<Communicator> messages,
                                              std::unique_ptr<Communicator> channels,
                                              Collectives collectives);

// What automatic takes for `bytes` over n ranks.
enum class AllReduceAlgorithm { ring, halving_doubling, recursive_doubling };
AllReduceAlgorithm fastest_all_reduce(int n, std::int64_t bytes);

}  // namespace echelon
