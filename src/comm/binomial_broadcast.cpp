// Binomial-tree broadcast: ranks, counted from the root, are halved again and again. In each step, the first
// rank of a range, which has the data, sends it to the first rank of the range's second half. The number of
// ranks with the data doubles in every step.
//
// Steps: log2(n), rounded up. Sent: the buffer once for every other rank; by the root log2(n) times, rounded
// up, by half the ranks never. (Thakur, Rabenseifner, Gropp: Optimization of collective communication
// operations in MPICH, 2005.)
#include <bit>

#include "base/halving_tree.h"
#include "comm/call.h"
#include "comm/collectives.h"
#include "comm/exchange.h"

namespace echelon {
namespace {

// Calls edge(from, to) for each message that rank `me` sends or receives, in order. Ranks count from the
// root.
template <class Edge>
void for_each_edge(int n, int me, const Edge& edge) {
  int begin = 0, end = n;
  while (end - begin > 1) {
    const int middle = halving_cut(begin, end);
    if (me == begin || me == middle) edge(begin, middle);
    (me < middle ? end : begin) = middle;
  }
}

}  // namespace

void binomial_broadcast(Communicator& group, const Tensor& x, int root) {
  check_arguments({.verb = Verb::broadcast, .root = root, .counts = {x.numel()}}, group, x, x);
  const int n = group.size(), me = around(group.rank() - root, n);
  for_each_edge(n, me, [&](int from, int to) {
    if (me == from)
      group.send(x, around(to + root, n)).wait();
    else
      group.recv(x, around(from + root, n)).wait();
  });
}

Cost binomial_broadcast_cost(int n, int rank, int root, std::int64_t count) {
  const int me = around(rank - root, n);
  Cost cost{.steps = static_cast<int>(std::bit_width(static_cast<unsigned>(n - 1)))};
  for_each_edge(n, me, [&](int from, int) {
    if (me == from) cost += {0, 1, count, 0};
  });
  return cost;
}

}  // namespace echelon
