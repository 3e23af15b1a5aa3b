// Context parallelism of layers with a state space (Dao & Gu 2024, https://arxiv.org/abs/2405.21060, section
// 8; as Megatron-Core does for Mamba): channels are exchanged head by head (channel_exchange.h), and the
// convolution and the scan need no communication. With fewer groups than ranks, each rank that has heads of a
// group gets a copy of its B and C, and their gradient is the sum over the copies.
#pragma once

#include <vector>

#include "parallel/channel_exchange.h"
#include "tensor/kernels.h"

namespace echelon {

class StateSpaceExchange {
 public:
  // `rank` outlives this. `all`: of this tp rank.
  StateSpaceExchange(const Rank& rank, const Plan& plan, const StateSpaceShape& all);

  const StateSpaceShape& here() const { return here_; }  // what this rank scans
  // This rank's part of all heads, and its ranges of [x | B | C].
  Range heads() const { return heads_of(rank_->coordinate(Axis::cp)); }
  std::vector<Range> mixed() const { return mixed_of(rank_->coordinate(Axis::cp)); }

  // Converts [z | x | B | C | dt] (with beta last for the delta rule) from this rank's tokens to its heads;
  // and the gradient back.
  Tensor to_heads(const Tensor& given) const { return exchange_.to_channels(given, given_); }
  void gradient_to_tokens(const Tensor& gradient, const Tensor& to) const {
    exchange_.to_tokens(gradient, given_, to);
  }
  // The output (rows, channels) back to tokens; and its gradient to heads.
  void output_to_tokens(const Tensor& y, const Tensor& to) const { exchange_.to_tokens(y, made_, to); }
  Tensor output_gradient_to_heads(const Tensor& dy) const { return exchange_.to_channels(dy, made_); }

 private:
  Range heads_of(int rank) const;
  std::vector<Range> mixed_of(int rank) const;

  const Rank* rank_;
  StateSpaceShape all_, here_;  // without rows
  ChannelExchange exchange_;
  ExchangedColumns given_, made_;
};

}  // namespace echelon
