// Ring all-reduce: a ring reduce-scatter of n even parts, then a ring all-gather of the sums, both in place.
//
// Steps: 2(n-1). Sent by each rank: 2(n-1)/n of the buffer, the minimum for any all-reduce: the bandwidth
// that a rank needs hardly grows with the number of ranks, but the number of steps does. Order: part s of n
// is ((x[s+1] + x[s+2]) + ...) + x[s], with ranks counted around the ring. (Patarasuk, Yuan: Bandwidth
// optimal all-reduce algorithms for clusters of workstations, 2009.)
#include "comm/call.h"
#include "comm/collectives.h"
#include "comm/exchange.h"

namespace echelon {

void ring_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch) {
  check_arguments({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, group, x, x);
  const std::vector<std::int64_t> counts = even_counts(x.numel(), group.size());
  const Tensor own = cut(x, counts)[static_cast<std::size_t>(group.rank())];
  ring_reduce_scatter(group, x, own, counts, op, scratch);
  ring_all_gather(group, own, x, counts);
}

Cost ring_all_reduce_cost(int n, int rank, std::int64_t count) {
  const std::vector<std::int64_t> counts = even_counts(count, n);
  Cost cost = ring_reduce_scatter_cost(rank, counts);
  return cost += ring_all_gather_cost(rank, counts);
}

}  // namespace echelon
