// Context parallelism by gathering under invariant numerics (docs/invariance.md): every rank gathers the keys
// and values of whole sequences in the order of their positions, so a query's sum over keys is the one of a
// single rank; backward also the queries and the gradients of their outputs, so a key's sum over queries is
// too. Scores are made again for each of both: 7 products of the backward pass where 5 are needed otherwise.
//
// Bytes sent by a rank, with q the bytes of its queries and b those of its keys (or values): forward
// x 2b, backward x (2b + 2q) and two numbers a query and head.
#pragma once

#include "parallel/context_blocks.h"
#include "parallel/whole_rows.h"

namespace echelon {

// What a rank has of B sequences whose tokens are cut over the R ranks of the cp group in runs of neighbours.
class WholeAttention {
 public:
  // All outlive this. `heads`: of this rank.
  WholeAttention(const Rank& rank, const WholeRows& rows, const ContextLayout& layout, const Heads& heads,
                 const Sequences& sequences);

  // As ContextBlocks: [q | k | v], its gradient, out and dout have a row for each token here.
  void forward(const Tensor& qkv, const Tensor& out, const Tensor& lse) const;
  void backward(const Tensor& qkv, const Tensor& dout, const Tensor& lse, const Tensor& delta,
                const Tensor& dqkv) const;
  // Numbers of each query and head: from those here, in the order of ContextBlocks, to (B * H, positions).
  Tensor whole_numbers(const Tensor& here) const;

 private:
  // visit(sequence, run, rows here)
  template <class Visit>
  void each_run(int cp_rank, const Visit& visit) const;
  // of a run's queries, in these rows, over all keys of their sequence
  AttentionShape shape_of(const PositionRun& run, Range rows) const;
  std::int64_t all_rows() const { return sequences_.batch * seq_len(); }
  std::int64_t seq_len() const { return layout_.ring() * layout_.core_tokens(); }
  Tensor of_sequence(const Tensor& all, std::int64_t sequence) const {
    return all.row_range(sequence * seq_len(), (sequence + 1) * seq_len());
  }

  const Rank& rank_;
  const WholeRows& rows_;
  const ContextLayout& layout_;
  const Heads& heads_;
  const Sequences& sequences_;
};

}  // namespace echelon
