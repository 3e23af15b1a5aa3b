// Recursive doubling all-reduce. In step k = 0 ... log2(n)-1 the ranks r and r xor 2^k exchange their whole
// buffers and both add them, the lower rank's first.
//
// Steps: log2(n), the fewest possible. Sent by each rank: log2(n) times the buffer. For small buffers, where
// only latency matters. Other n: as in halving_doubling_all_reduce.cpp, with two more steps, and a rank of a
// pair sends the buffer once more. Order: by halves, as communicator.h says. (Thakur, Rabenseifner, Gropp:
// Optimization of collective communication operations in MPICH, 2005.)
#include "comm/call.h"
#include "comm/collectives.h"
#include "comm/exchange.h"
#include "comm/fold.h"

namespace echelon {

void recursive_doubling_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch) {
  check_arguments({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, group, x, x);
  const Fold at(group.size(), group.rank());
  if (fold(group, at, x, op, scratch)) {
    const Tensor received = scratch.first(x, x.numel());
    for (int bit = 1; bit < at.blocks; bit *= 2) {
      const int peer = Fold::first_of(group.size(), at.index ^ bit);
      const bool lower = (at.index & bit) == 0;
      send_receive(group, x, peer, received, peer);
      reduce_two(op, lower ? x : received, lower ? received : x, x);
    }
  }
  unfold(group, at, x);
}

Cost recursive_doubling_all_reduce_cost(int n, int rank, std::int64_t count) {
  const Fold at(n, rank);
  Cost cost = fold_cost(n, rank, count);
  for (int bit = 1; bit < at.blocks; bit *= 2) cost += at.acts ? Cost{1, 1, count, count} : Cost{.steps = 1};
  return cost;
}

}  // namespace echelon
