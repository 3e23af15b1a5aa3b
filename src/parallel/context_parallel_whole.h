// Context parallelism by gathering and by a ring under invariant numerics (docs/invariance.md): every rank
// gets the keys and values of whole sequences and keeps them, in the order of their positions, so a query's
// sum over keys is the one of a single rank; backward also the queries and the gradients of their outputs, so
// a key's sum over queries is too. Scores are made again for each of both: 7 products of the backward pass
// where 5 are needed otherwise.
//
// In a ring they travel from rank to rank, and a run of queries is computed once all keys that it sees have
// come, beside what is still under way.
//
// Bytes sent by a rank, with q the bytes of its queries and b those of its keys (or values): forward
// x 2b, backward x (2b + 2q) and two numbers a query and head.
#pragma once

#include "parallel/context_blocks.h"
#include "parallel/whole_rows.h"

namespace echelon {

// What a rank has of B sequences whose tokens are cut over R ranks.
class WholeAttention {
 public:
  // All outlive this. `heads`: that this rank computes. `rows`: of the cp group that gathers; nullptr: they
  // travel around `ring`.
  WholeAttention(const Rank& rank, Communicator& ring, const WholeRows* rows, const ContextLayout& layout,
                 const Heads& heads, const Sequences& sequences);

  // As ContextBlocks: [q | k | v], its gradient, out and dout have a row for each token here.
  void forward(const Tensor& qkv, const Tensor& out, const Tensor& lse) const;
  void backward(const Tensor& qkv, const Tensor& dout, const Tensor& lse, const Tensor& delta,
                const Tensor& dqkv) const;
  // Numbers of each query and head: from those here, in the order of ContextBlocks, to (B * H, positions).
  Tensor whole_numbers(const Tensor& here) const;

 private:
  // visit(sequence, run, rows of that ring index)
  template <class Visit>
  void each_run(int ring_index, const Visit& visit) const;
  // The same of the runs here whose keys have all come with the last of these steps of the ring.
  template <class Visit>
  void each_run_of(Range steps, const Visit& visit) const;
  // use(keys and values of whole sequences, steps that are over), until all are.
  template <class Use>
  void with_keys(const Tensor& qkv, const Use& use) const;
  // take(ring index, what it has of x), and meanwhile(step) while the next one's is under way.
  template <class Take, class Meanwhile>
  void travel(const Tensor& x, bool are_keys, const Take& take, const Meanwhile& meanwhile) const;
  Tensor whole_rows(const Tensor& here) const;
  Tensor whole_positions(const Tensor& here) const;  // i32
  void put_rows(int ring_index, const Tensor& x, const Tensor& whole) const;
  void put_numbers(int ring_index, const Tensor& x, const Tensor& whole) const;
  // Of a run's queries, in these rows, over the keys of their sequence up to their last one's.
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
