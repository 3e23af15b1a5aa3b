// Context parallelism: the tokens of each sequence are cut over the cp group, so that what a rank keeps of a
// sequence falls as 1/cp. Everything but attention works on a rank's own tokens; attention reaches the keys
// and values of the other ranks by a ring (context_parallel_ring.h), by gathering them
// (context_parallel_allgather.h), by exchanging tokens for heads (context_parallel_ulysses.h), or by a ring
// of groups that exchange heads (USP, Fang & Zhao 2024, https://arxiv.org/abs/2405.07719). Which tokens are
// where: spec/context_layout.h.
//
// Parameters are the same on all cp ranks and each rank's gradient is a part, so gradients are summed over dp
// and cp together, and ZeRO cuts state over both.
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

  // Rotated [q | k | v] of this rank's tokens, handed over, to what attention computes with here and its
  // backward pass needs again.
  Tensor enter(const Sequences& sequences, Tensor qkv) const;
  // out (N, H D) of this rank's tokens, and as many log-sums of exponentials as it has rows and heads.
  // `sinks` (H): see Kernels::attention_sink; undefined: none.
  void forward(const Sequences& sequences, const Tensor& core, const Tensor& sinks, const Tensor& out,
               const Tensor& lse) const;
  // out . dout of each row and head of this rank's tokens.
  Tensor delta(const Sequences& sequences, const Tensor& out, const Tensor& dout) const;
  // dqkv is overwritten with the gradient of what enter() was given. dout and delta are handed over. The
  // gradient of `sinks` is added to, over the queries that are computed here.
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
  // Of what is a number for each head: those that this rank computes.
  Tensor heads_here(const Tensor& of_heads) const;
  Range range_here() const;  // those among all
  WholeAttention whole_attention(const Sequences& sequences) const;
  // visit(rows, shape) for each run of positions of the sequences from `begin` to `end`, in the order of
  // ContextBlocks; or once for all of them where each is one run.
  template <class Visit>
  void each_run(Range sequences, const Visit& visit) const;
  AttentionShape whole_sequences(const Sequences& sequences, const Tensor& core) const;
  Tensor own_kv(const Tensor& core) const;

  const Rank* rank_;
  ContextLayout layout_;
  bool gathers_;
  Heads heads_;  // of this rank's tokens
  Heads here_;   // that this rank computes
  // Under invariant numerics, where tokens of a sequence are on several ranks while attention computes.
  bool is_whole_;
  std::optional<WholeRows> whole_rows_;  // which are gathered
};

}  // namespace echelon
