// Collectives written once over send and recv: what runs between machines, and what the direct forms of
// thread ranks (thread_movement.cpp) are compared with. One page of code each.
//
// All of them block: when one returns, this rank's part is done. As a send never waits for its receive, that
// is safe wherever blocking collectives are: every rank of the group calls the same ones in the same order.
// On each channel they use, messages of others must not stand between theirs. Counts may be uneven or zero;
// tensors are contiguous, f32, f64, bf16 or i32. CommError on wrong arguments, and where send and recv throw
// it.
//
// How a sum is grouped depends on group ranks only. halving_doubling and recursive_doubling group by halves,
// as communicator.h says, and so give the bits of the direct forms; a ring adds one rank after another.
//
// Partial sums of bf16 are rounded to bf16 at each hop, after an addition in f32. A summand x passes h
// roundings, each off by at most u = 2^-8 of the partial sum, which is at most sum |x| (1 + u)^(h-1): the
// result is within h u (1 + u)^(h-1) sum |x|, with h = n-1 in a ring and ceil(log2 n) by halves. The rank
// that ends a sum hands the same bits to all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "comm/communicator.h"

namespace echelon {

// Memory for what comes from another rank before it is added, kept from call to call. No rank's account has
// it.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  // Where `like` is and of its dtype; undefined contents, until the next call. On a device it has a stream of
  // its own, and what is queued on it and on others by exchange.h keeps the order of the calls.
  Tensor first(const Tensor& like, std::int64_t count);

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::int64_t capacity_ = 0;            // bytes
  std::unique_ptr<Arena> device_arena_;  // of what is on a device
  Tensor on_device_;
};

// What one rank does in a collective of n ranks.
struct Cost {
  int steps = 0;              // messages that wait for one another, the same on every rank: times the latency
  std::int64_t messages = 0;  // sent by this rank
  std::int64_t sent = 0;      // elements in them
  std::int64_t reduced = 0;   // elements that it adds to others, or takes the larger one of
  Cost& operator+=(const Cost& more) {
    steps += more.steps;
    messages += more.messages;
    sent += more.sent;
    reduced += more.reduced;
    return *this;
  }
};

// x, in place, becomes the sum (or maximum) over ranks.
void ring_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch);
Cost ring_all_reduce_cost(int n, int rank, std::int64_t count);
void halving_doubling_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch);
Cost halving_doubling_all_reduce_cost(int n, int rank, std::int64_t count);
void recursive_doubling_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch);
Cost recursive_doubling_all_reduce_cost(int n, int rank, std::int64_t count);

// Arguments as in Communicator. For a ring reduce-scatter `out` may also be its own place inside `in`.
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
