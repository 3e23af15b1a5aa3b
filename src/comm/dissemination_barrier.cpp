// Dissemination barrier: in step k rank r sends an empty message to rank r + 2^k and waits for one from rank
// r - 2^k. After step k it has heard, directly or through others, from the 2^(k+1) - 1 ranks before it.
//
// Steps: log2(n), rounded up. Sent by each rank: as many messages, no bytes.
// (Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988.)
#include <bit>

#include "comm/collectives.h"
#include "comm/exchange.h"

namespace echelon {

void dissemination_barrier(Communicator& group) {
  const int n = group.size(), rank = group.rank();
  std::int32_t none = 0;
  const Tensor nothing = Tensor::view_of(&none, DType::i32, {0});
  for (int distance = 1; distance < n; distance *= 2)
    send_receive(group, nothing, around(rank + distance, n), nothing, around(rank - distance, n));
}

Cost dissemination_barrier_cost(int n) {
  const int steps = static_cast<int>(std::bit_width(static_cast<unsigned>(n - 1)));
  return {steps, steps, 0, 0};
}

}  // namespace echelon
