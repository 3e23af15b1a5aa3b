// Context parallelism, by gathering or by a ring, under invariant numerics (docs/invariance.md). Every rank
// collects the keys and values of whole sequences in the order of their positions, so that a query's sum over
// keys is the same as on a single rank. The backward pass also collects the queries and the gradients of
// their outputs, so that a key's sum over queries is the same too. Scores are recomputed for each of the two
// sums: the backward pass has 7 products instead of 5.
//
// In a ring, a run of queries is computed as soon as all keys that it sees have arrived, while the rest is in
// flight.
//
// Bytes sent by a rank, with q the bytes of its queries and b those of its keys (or values): forward x
// 2b, backward x (2b + 2q) and two numbers per query and head.
#pragma once

#include "parallel/context_blocks.h"
#include "parallel/whole_rows.h"

namespace echelon {

// Attention of one rank, for B sequences whose tokens are cut over R ranks.
class WholeAttention {
 public:
  // All outlive this. `heads`: those that this rank computes. `rows`: gathers over the cp group; nullptr:
  // keys and values travel around `ring`.
  WholeAttention(const Rank& rank, Communicator& ring, const WholeRows* rows, const ContextLayout& layout,
                 const Heads& heads, const Sequences& sequences);

  // Shapes as in ContextBlocks: [q | k | v], its gradient, out and dout have a row for each token of this
  // rank.
  void forward(const Tensor& qkv, const Tensor& out, const Tensor& lse) const;
  void backward(const Tensor& qkv, const Tensor& dout, const Tensor& lse, const Tensor& delta,
                const Tensor& dqkv) const;
  // Gathers one number for each query and head: from this rank's, in the order of ContextBlocks, to (B * H,
  // positions).
  Tensor whole_numbers(const Tensor& here) const;

 private:
  // Calls visit(sequence, run, rows of that ring index).
  template <class Visit>
  void each_run(int ring_index, const Visit& visit) const;
  // The same for this rank's runs whose last needed keys arrived within these steps of the ring.
  template <class Visit>
  void each_run_of(Range steps, const Visit& visit) const;
  // Calls use(keys and values of whole sequences, finished steps), until all steps are finished.
  template <class Use>
  void with_keys(const Tensor& qkv, const Use& use) const;
  // Sends x around the ring: calls take(ring index, its x) for each, and meanwhile(step) while the next one
  // is in flight.
  template <class Take, class Meanwhile>
  void travel(const Tensor& x, bool are_keys, const Take& take, const Meanwhile& meanwhile) const;
  Tensor whole_rows(const Tensor& here) const;
  Tensor whole_positions(const Tensor& here) const;  // i32
  void put_rows(int ring_index, const Tensor& x, const Tensor& whole) const;
  void put_numbers(int ring_index, const Tensor& x, const Tensor& whole) const;
  // The shape of attention of a run's queries, in these rows, to the keys of their sequence up to that of the
  // last query.
  AttentionShape shape_of(const PositionRun& run, Range rows) const;
  std::int64_t all_rows() const { return sequences_.batch * seq_len(); }
  std::int64_t seq_len() const { return layout_.ring() * layout_.core_tokens(); }
  Tensor of_sequence(const Tensor& all, std::int64_t sequence) const {
    return all.row_range(sequence * seq_len(), (sequence + 1) * seq_len());
  }

  const Rank& rank_;
  Communicator& ring_;
  const WholeRows* rows_;
  const ContextLayout& layout_;
  const Heads& heads_;
  const Sequences& sequences_;
  int own_;  // ring index
};

}  // namespace echelon
