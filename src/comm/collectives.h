// Collectives implemented once on top of send and recv, with one short file per algorithm. They run between
// machines, and are the reference for the direct implementations of thread ranks (thread_movement.cpp).
//
// All of them block: when one returns, this rank's part is done. A send never waits for its receive, so this
// is safe wherever blocking collectives are: every rank of the group calls the same ones in the same order,
// and no other messages come between theirs on the channels that they use. Counts may be uneven or zero;
// tensors are contiguous, f32, f64, bf16 or i32. CommError on wrong arguments, and where send and recv throw
// it.
//
// The grouping of a sum depends on group ranks only. halving_doubling and recursive_doubling group by halves,
// as communicator.h says, and so give the bits of the direct implementations; a ring adds one rank after
// another.
//
// Partial sums of bf16 are added in f32 and rounded to bf16 at each hop. A summand x passes h roundings, each
// off by at most u = 2^-8 of the partial sum, which is at most sum |x| (1 + u)^(h-1): the error of the result
// is at most h u (1 + u)^(h-1) sum |x|, with h = n-1 in a ring and ceil(log2 n) by halves. The rank that
// completes a sum sends the same bits to all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "comm/communicator.h"

namespace echelon {

// Buffer for data that arrives from another rank to be added, kept from call to call. No rank's memory
// account includes it.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  // A buffer on the device of `like` with its dtype; contents are undefined, and it is valid until the next
  // call. On a device it has a stream of its own; exchange.h queues work on it and on other streams in the
  // order of the calls.
  Tensor first(const Tensor& like, std::int64_t count);

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::int64_t capacity_ = 0;            // bytes
  std::unique_ptr<Arena> device_arena_;  // for device memory
  Tensor on_device_;
};

// The cost of a collective of n ranks for one rank.
struct Cost {
  int steps = 0;              // messages in sequence, equal on every rank: times the latency
  std::int64_t messages = 0;  // sent by this rank
  std::int64_t sent = 0;      // elements in them
  std::int64_t reduced = 0;   // elements that it adds, or compares for a maximum
  Cost& operator+=(const Cost& more) {
    steps += more.steps;
    messages += more.messages;
    sent += more.sent;
    reduced += more.reduced;
    return *this;
  }
};

// All-reduces: x becomes, in place, the sum (or maximum) over ranks.
void ring_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch);
Cost ring_all_reduce_cost(int n, int rank, std::int64_t count);
void halving_doubling_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch);
Cost halving_doubling_all_reduce_cost(int n, int rank, std::int64_t count);
void recursive_doubling_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch);
Cost recursive_doubling_all_reduce_cost(int n, int rank, std::int64_t count);

// Arguments as in Communicator. In ring_reduce_scatter, `out` may also be its own place inside `in`.
void ring_all_gather(Communicator& group, const Tensor& in, const Tensor& out,
                     std::span<const std::int64_t> counts);
Cost ring_all_gather_cost(int rank, std::span<const std::int64_t> counts);
void ring_reduce_scatter(Communicator& group, const Tensor& in, const Tensor& out,
                         std::span<const std::int64_t> counts, ReduceOp op, Scratch& scratch);
Cost ring_reduce_scatter_cost(int rank, std::span<const std::int64_t> counts);
void pairwise_all_to_all(Communicator& group, const Tensor& in, std::span<const std::int64_t> send_counts,
                         const Tensor& out, std::span<const std::int64_t> recv_counts);
Cost pairwise_all_to_all_cost(int rank, std::span<const std::int64_t> send_counts);

void binomial_broadcast(Communicator& group, const Tensor& x, int root);
Cost binomial_broadcast_cost(int n, int rank, int root, std::int64_t count);
void dissemination_barrier(Communicator& group);
Cost dissemination_barrier_cost(int n);

}  // namespace echelon
