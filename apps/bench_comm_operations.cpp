#include "apps/bench_comm_operations.h"

#include <algorithm>

#include "comm/exchange.h"

namespace echelon {
namespace {

double bus_all_reduce(double n) { return 2 * (n - 1) / n; }
double bus_part(double n) { return (n - 1) / n; }
double bus_whole(double) { return 1; }
double bus_nothing(double) { return 0; }

// A direct form has one step. What it reads from, or writes to, other ranks' memory counts as sent.
auto direct(double (*bus)(double), double (*buffers_copied)(double n)) {
  return [=](int n, std::int64_t count) {
    const double c = n > 1 ? static_cast<double>(count) : 0;  // a single rank sends nothing
    return CommWork{n > 1 ? 1 : 0, bus(n) * c, buffers_copied(n) * c};
  };
}

// Each message is copied once; an addition reads two elements and writes one.
template <class CostOfRank>
CommWork work_of(int n, const CostOfRank& cost_of_rank) {
  CommWork work;
  for (int rank = 0; rank < n; ++rank) {
    const Cost cost = cost_of_rank(rank);
    work.steps = cost.steps;
    work.sent = std::max(work.sent, static_cast<double>(cost.sent));
    work.copied += static_cast<double>(cost.sent) + 1.5 * static_cast<double>(cost.reduced);
  }
  return work;
}
auto of_buffer(Cost (*cost)(int n, int rank, std::int64_t count)) {
  return
      [=](int n, std::int64_t count) { return work_of(n, [&](int rank) { return cost(n, rank, count); }); };
}
auto of_parts(Cost (*cost)(int rank, std::span<const std::int64_t> counts)) {
  return [=](int n, std::int64_t count) {
    return work_of(n, [&](int rank) { return cost(rank, even_counts(count, n)); });
  };
}

// Sends there and back between ranks 0 and 1.
void send_and_receive(CommBuffers& x) {
  const int peer = 1 - x.group.rank();
  if (peer == 1) x.group.send(x.a, peer).wait();
  x.group.recv(x.b, peer).wait();
  if (peer == 0) x.group.send(x.a, peer).wait();
}

CommWork copy_of_all(int n, std::int64_t count) { return {0, 0, static_cast<double>(n * count)}; }

}  // namespace

const std::vector<CommOperation>& comm_operations() {
  constexpr ReduceOp sum = ReduceOp::sum;
  static const std::vector<CommOperation> all{
      {"memory copy", bus_whole, [](CommBuffers& x) { copy(x.a, x.b); }, copy_of_all},
      // Bypasses the caches: does not read what it overwrites.
      {"streaming copy", bus_whole, [](CommBuffers& x) { copy(x.a, x.b, true); }, copy_of_all},
      {"send, recv", bus_whole, send_and_receive,
       [](int, std::int64_t count) {
         return CommWork{1, static_cast<double>(count), static_cast<double>(count)};
       },
       2, 2},
      {"all_reduce", bus_all_reduce, [](CommBuffers& x) { x.group.all_reduce(x.a).wait(); },
       direct(bus_all_reduce, [](double n) { return n; })},
      {"ring_all_reduce", bus_all_reduce,
       [](CommBuffers& x) { ring_all_reduce(x.group, x.a, sum, x.scratch); },
       of_buffer(ring_all_reduce_cost)},
      {"halving_doubling_all_reduce", bus_all_reduce,
       [](CommBuffers& x) { halving_doubling_all_reduce(x.group, x.a, sum, x.scratch); },
       of_buffer(halving_doubling_all_reduce_cost)},
      {"recursive_doubling_all_reduce", bus_all_reduce,
       [](CommBuffers& x) { recursive_doubling_all_reduce(x.group, x.a, sum, x.scratch); },
       of_buffer(recursive_doubling_all_reduce_cost)},
      {"all_gather", bus_part, [](CommBuffers& x) { x.group.all_gather(x.place, x.b, x.counts).wait(); },
       direct(bus_part, [](double n) { return n / 2; })},
      {"ring_all_gather", bus_part, [](CommBuffers& x) { ring_all_gather(x.group, x.place, x.b, x.counts); },
       of_parts(ring_all_gather_cost)},
      {"reduce_scatter", bus_part,
       [](CommBuffers& x) { x.group.reduce_scatter(x.a, x.own, x.counts).wait(); },
       direct(bus_part, [](double n) { return (n + 1) / 2; })},
      {"ring_reduce_scatter", bus_part,
       [](CommBuffers& x) { ring_reduce_scatter(x.group, x.a, x.own, x.counts, sum, x.scratch); },
       of_parts(ring_reduce_scatter_cost)},
      {"all_to_all", bus_part,
       [](CommBuffers& x) { x.group.all_to_all(x.out, x.equal, x.in, x.equal).wait(); },
       direct(bus_part, [](double n) { return n; })},
      {"pairwise_all_to_all", bus_part,
       [](CommBuffers& x) { pairwise_all_to_all(x.group, x.out, x.equal, x.in, x.equal); },
       [](int n, std::int64_t count) {
         CommWork work = of_parts(pairwise_all_to_all_cost)(n, count);
         work.copied += static_cast<double>(count);  // the part that a rank sends to itself
         return work;
       }},
      {"broadcast", bus_whole, [](CommBuffers& x) { x.group.broadcast(x.a, x.next_root()).wait(); },
       direct(bus_whole, [](double n) { return n / 2; })},
      {"binomial_broadcast", bus_whole,
       [](CommBuffers& x) { binomial_broadcast(x.group, x.a, x.next_root()); },
       [](int n, std::int64_t count) {
         return work_of(n, [&](int rank) { return binomial_broadcast_cost(n, rank, 0, count); });
       }},
      {"barrier", bus_nothing, [](CommBuffers& x) { x.group.barrier().wait(); },
       direct(bus_nothing, [](double) { return 0.0; })},
      {"dissemination_barrier", bus_nothing, [](CommBuffers& x) { dissemination_barrier(x.group); },
       [](int n, std::int64_t) { return work_of(n, [n](int) { return dissemination_barrier_cost(n); }); }},
  };
  return all;
}

}  // namespace echelon
