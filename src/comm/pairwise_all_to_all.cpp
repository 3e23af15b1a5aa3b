// Pairwise-exchange all-to-all: in step k = 1 ... n-1 rank r sends to rank r+k and receives from rank r-k, so
// that no two ranks send to the same one at once.
//
// Steps: n-1. Sent by rank r: everything but what it sends to itself; (n-1)/n of its buffer if counts are
// even. Every element travels once, which is optimal; empty messages travel too, since the other rank waits
// for them. (Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH,
// 2005.)

#include "base/split.h"
#include "comm/call.h"
#include "comm/collectives.h"
#include "comm/exchange.h"

namespace echelon {

void pairwise_all_to_all(Communicator& group, const Tensor& in, std::span<const std::int64_t> send_counts,
                         const Tensor& out, std::span<const std::int64_t> recv_counts) {
  check_arguments({.verb = Verb::all_to_all,
                   .counts = {send_counts.begin(), send_counts.end()},
                   .recv_counts = {recv_counts.begin(), recv_counts.end()}},
                  group, in, out);
  const int n = group.size(), rank = group.rank();
  const std::vector<Tensor> sent = cut(in, send_counts), received = cut(out, recv_counts);
  const auto own = static_cast<std::size_t>(rank);
  copy(sent[own], received[own]);
  for (int k = 1; k < n; ++k) {
    const int to = around(rank + k, n), from = around(rank - k, n);
    send_receive(group, sent[static_cast<std::size_t>(to)], to, received[static_cast<std::size_t>(from)],
                 from);
  }
}

Cost pairwise_all_to_all_cost(int rank, std::span<const std::int64_t> send_counts) {
  const int n = static_cast<int>(send_counts.size());
  const std::int64_t whole = sum_of(send_counts);
  return {n - 1, n - 1, whole - send_counts[static_cast<std::size_t>(rank)], 0};
}

}  // namespace echelon
