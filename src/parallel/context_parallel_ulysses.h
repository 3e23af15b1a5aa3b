// DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): an all-to-all takes each rank
// from its part of the sequence and all heads to the whole sequence and its part of the heads; attention
// needs no communication there; another brings the output back. Forward 4 of them (q, k, v, output), backward
// 4, and one number a query and head (delta). Bytes sent by a rank and all-to-all: (U-1)/U of the matrix, so
// the volume of a rank falls as 1/U where that of tensor parallelism stays.
#pragma once

#include "comm/rank.h"
#include "parallel/heads.h"
#include "spec/context_layout.h"

namespace echelon {

// B sequences; T tokens of each on each of the U ranks of the group, in its order.
class UlyssesExchange {
 public:
  // All outlive this. `heads`: those of this rank's tokens. With fewer key/value heads than ranks, ranks that
  // need the same one each get a copy, and its gradient is the sum of theirs.
  UlyssesExchange(const Rank& rank, Communicator& group, const ContextLayout& layout, const Heads& heads,
                  std::int64_t batch);

  // The heads that rank `index` of the group computes.
  static Heads part_of(const Heads& heads, int ulysses);

  // [q | k | v] (B*T, all heads) to (B*U*T, heads here).
  Tensor to_heads(const Tensor& qkv) const;
  // Its gradient back, to `dqkv`.
  void gradient_to_tokens(const Tensor& dcore, const Tensor& dqkv) const;
  // Query heads alone, (B*U*T, heads here) to `out` (B*T, all heads); and their gradient the other way.
  void output_to_tokens(const Tensor& core, const Tensor& out) const;
  Tensor output_gradient_to_heads(const Tensor& dout) const;
  // delta of (B, heads, T) to the order of ContextBlocks.
  Tensor delta_to_heads(const Tensor& delta) const;

 private:
  struct Columns;
  Columns columns(std::int64_t heads) const;
  void to_heads(const Tensor& x, std::int64_t heads, const Tensor& core) const;
  void to_tokens(const Tensor& core, std::int64_t heads, const Tensor& x) const;

  const Rank& rank_;
  Communicator& group_;
  const ContextLayout& layout_;
  Heads heads_, here_;
  std::int64_t batch_, tokens_;
};

}  // namespace echelon
