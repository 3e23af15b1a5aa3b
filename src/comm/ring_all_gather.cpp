// Ring all-gather: every part travels once around the ring. In step k = 0 ... n-2 rank r sends the part of
// rank r-k to rank r+1 and receives the part of rank r-k-1 from rank r-1.
//
// Steps: n-1. Sent by rank r: every part but that of rank r+1; (n-1)/n of the whole where parts are even, and
// no all-gather sends less. (Chan, Heimlich, Purkayastha, van de Geijn: Collective communication: theory,
// practice, and experience, 2007.)

#include "base/split.h"
#include "comm/call.h"
#include "comm/collectives.h"
#include "comm/exchange.h"

namespace echelon {

void ring_all_gather(Communicator& group, const Tensor& in, const Tensor& out,
                     std::span<const std::int64_t> counts) {
  check_arguments({.verb = Verb::all_gather, .counts = {counts.begin(), counts.end()}}, group, in, out);
  const int n = group.size(), rank = group.rank();
  const std::vector<Tensor> parts = cut(out, counts);
  const auto part_of = [&](int r) { return parts[static_cast<std::size_t>(around(r, n))]; };
  copy(in, part_of(rank));
  for (int k = 0; k < n - 1; ++k)
    send_receive(group, part_of(rank - k), around(rank + 1, n), part_of(rank - k - 1), around(rank - 1, n));
}

Cost ring_all_gather_cost(int rank, std::span<const std::int64_t> counts) {
  const int n = static_cast<int>(counts.size());
  if (n == 1) return {};
  const std::int64_t whole = sum_of(counts);
  return {n - 1, n - 1, whole - counts[static_cast<std::size_t>(around(rank + 1, n))], 0};
}

}  // namespace echelon
