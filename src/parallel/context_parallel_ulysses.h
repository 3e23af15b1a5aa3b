// DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): an all-to-all turns a part of the
// sequence with all heads into the whole sequence with a part of the heads. Attention then needs no
// communication, and another all-to-all brings the output back. There are 4 of them forward (q, k, v, output)
// and 4 backward, plus one number per query and head (delta). Bytes sent by a rank in each: (U-1)/U of the
// matrix. The matrix shrinks as 1/U, so a rank's volume does too, while that of tensor parallelism stays
// constant.
#pragma once

#include "comm/rank.h"
#include "parallel/heads.h"
#include "spec/context_layout.h"

namespace echelon {

// For B sequences, with T tokens of each on each of the group's U ranks, in rank order.
class UlyssesExchange {
 public:
  // All outlive this. `heads`: of this rank's tokens, of which it computes a part. With fewer key/value heads
  // than ranks, each rank that needs a head gets a copy, and the head's gradient is the sum over the copies.
  UlyssesExchange(const Rank& rank, Communicator& group, const ContextLayout& layout, const Heads& heads,
                  std::int64_t batch);

  // From [q | k | v] (B*T, all heads) to (B*U*T, this rank's heads).
  Tensor to_heads(const Tensor& qkv) const;
  // The gradient of that, back to `dqkv`.
  void gradient_to_tokens(const Tensor& dcore, const Tensor& dqkv) const;
  // Query heads only: from (B*U*T, this rank's heads) to `out` (B*T, all heads); and their gradient the other
  // way.
  void output_to_tokens(const Tensor& core, const Tensor& out) const;
  Tensor output_gradient_to_heads(const Tensor& dout) const;
  // delta, from (B, heads, T) to the order of ContextBlocks.
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
