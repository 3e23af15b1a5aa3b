// Ring reduce-scatter: the partial sum of each part travels once around the ring and ends at its owner. In
// step k = 0 ... n-2 rank r sends the partial sum of part r-1-k to rank r+1, receives that of part r-2-k from
// rank r-1 and adds its own.
//
// Steps: n-1. Sent by rank r: every part but its own; (n-1)/n of the whole where parts are even, and no
// reduce-scatter sends less.
// Order: part s is ((x[s+1] + x[s+2]) + ...) + x[s], ranks counted round the ring.
// (Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.)
#include <algorithm>

#include "base/split.h"
#include "comm/call.h"
#include "comm/collectives.h"
#include "comm/exchange.h"

namespace echelon {

void ring_reduce_scatter(Communicator& group, const Tensor& in, const Tensor& out,
                         std::span<const std::int64_t> counts, ReduceOp op, Scratch& scratch) {
  check_arguments({.verb = Verb::reduce_scatter, .op = op, .counts = {counts.begin(), counts.end()}}, group,
                  in, out);
  const int n = group.size(), rank = group.rank();
  const std::vector<Tensor> parts = cut(in, counts);
  const auto part_of = [&](int r) { return parts[static_cast<std::size_t>(around(r, n))]; };
  if (n == 1) return copy(in, out);
  const std::int64_t largest = *std::max_element(counts.begin(), counts.end());
  // One place holds the sum that is sent while the other receives.
  const Tensor places = scratch.first(in, 2 * largest);
  Tensor sum = part_of(rank - 1);
  for (int k = 0; k < n - 1; ++k) {
    const Tensor own = part_of(rank - 2 - k);
    const std::int64_t place = k % 2 * largest;
    const Tensor received = places.flat_range(place, place + own.numel());
    send_receive(group, sum, around(rank + 1, n), received, around(rank - 1, n));
    sum = k < n - 2 ? received : out;
    reduce_two(op, received, own, sum);
  }
}

Cost ring_reduce_scatter_cost(int rank, std::span<const std::int64_t> counts) {
  const int n = static_cast<int>(counts.size());
  if (n == 1) return {};
  const std::int64_t whole = sum_of(counts);
  return {n - 1, n - 1, whole - counts[static_cast<std::size_t>(rank)],
          whole - counts[static_cast<std::size_t>(around(rank - 1, n))]};
}

}  // namespace echelon
