// Context parallelism: the tokens of each sequence are cut over the cp group, so that a rank's activations of
// a sequence shrink by cp. Everything but attention works on a rank's own tokens. Attention reaches the keys
// and values of the other ranks in one of four ways: a ring (context_parallel_ring.h); gathering
// (context_parallel_allgather.h); exchanging tokens for heads (context_parallel_ulysses.h); or a ring across
// groups that exchange heads (USP, Fang & Zhao 2024, https://arxiv.org/abs/2405.07719). spec/context_layout.h
// says which tokens are where.
//
// Parameters are the same on all cp ranks and each rank's gradient is partial, so gradients are summed over
// dp and cp together, and ZeRO shards state over both.
#pragma once

#include <optional>

#include "parallel/context_parallel_whole.h"
#include "spec/plan.h"
#include "tensor/sequence_sums.h"
#include "tensor/weight.h"

namespace echelon {

class ContextParallel {
 public:
  // `rank` outlives this. `heads`: of this tp rank.
  ContextParallel(const Rank& rank, const Plan& plan, const Heads& heads);

  // Takes over the rotated [q | k | v] of this rank's tokens. Returns the operands of this rank's attention,
  // which its backward pass needs again.
  Tensor enter(const Sequences& sequences, Tensor qkv) const;
  // Computes out (N, H D) of this rank's tokens, and the log-sum-exp of each row and head. `sinks` (H): see
  // Kernels::attention_sink; undefined: none.
  void forward(const Sequences& sequences, const Tensor& core, const Tensor& sinks, const Tensor& out,
               const Tensor& lse) const;
  // The dot product out . dout for each row and head of this rank's tokens.
  Tensor delta(const Sequences& sequences, const Tensor& out, const Tensor& dout) const;
  // Overwrites dqkv with the gradient of enter()'s input. Takes over dout and delta. Adds the gradient of
  // `sinks` over the queries that this rank computes.
  void backward(const Sequences& sequences, const Tensor& core, const Weight& sinks, const SequenceSums& sums,
                Tensor dout, const Tensor& lse, Tensor delta, const Tensor& dqkv) const;

 private:
  Communicator& ring() const { return rank_->cp_across_blocks(layout_.ulysses()); }
  Communicator& neighbours() const { return rank_->cp_block(layout_.ulysses()); }
  bool exchanges_heads() const { return layout_.ulysses() > 1; }
  void core_forward(const Sequences& sequences, const Tensor& core, const Tensor& sinks, const Tensor& out,
                    const Tensor& lse) const;
  void core_backward(const Sequences& sequences, const Tensor& core, const Tensor& dout, const Tensor& lse,
                     const Tensor& delta, const Tensor& dcore) const;
  void attend(const Sequences& sequences, const Tensor& core, const Tensor& out, const Tensor& lse) const;
  void add_sink_gradient(const Sequences& sequences, const Weight& sinks, const SequenceSums& sums,
                         const Tensor& lse, const Tensor& delta) const;
  void add_sink_gradient_of_heads(const Sequences& sequences, const Weight& sinks, const SequenceSums& sums,
                                  const Tensor& lse, const Tensor& delta) const;
  // Of a vector with a number for each head: those of the heads that this rank computes.
  Tensor heads_here(const Tensor& of_heads) const;
  Range range_here() const;  // their range among all heads
  WholeAttention whole_attention(const Sequences& sequences) const;
  // Calls visit(rows, shape) for each run of positions of sequences [begin, end), in the order of
  // ContextBlocks; or once for all of them if each is a single run.
  template <class Visit>
  void each_run(Range sequences, const Visit& visit) const;
  AttentionShape whole_sequences(const Sequences& sequences, const Tensor& core) const;
  Tensor own_kv(const Tensor& core) const;

  const Rank* rank_;
  ContextLayout layout_;
  bool gathers_;
  Heads heads_;  // of this rank's tokens
  Heads here_;   // that this rank computes
  // Whether numerics are invariant and a sequence's tokens lie on several ranks while attention computes.
  bool is_whole_;
  std::optional<WholeRows> whole_rows_;  // if these are gathered
};

}  // namespace echelon
