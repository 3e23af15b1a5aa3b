// Synchronous data parallelism: every dp rank computes its own samples, gradients are summed over dp, every
// rank takes the same step. Gradients are scaled by 1/(target tokens of the global batch) where the loss is,
// so a sum is all that is needed. Buckets (Li et al. 2020, PyTorch DDP, https://arxiv.org/abs/2006.15704):
// the all_reduce of what the backward pass has finished goes on while the rest of it runs. Bytes sent per
// rank and step: 2(d-1)/d of the gradients.
#pragma once

#include <vector>

#include "base/split.h"
#include "comm/rank.h"

namespace echelon {

// The reduction of one step's gradients.
class DataParallel {
 public:
  // `gradients`: the flat buffer of this rank; `buckets`: see gradient_buckets().
  DataParallel(const Rank& rank, Tensor gradients, std::vector<Range> buckets);

  // The range has its final local value. Buckets are sent in their order, each as soon as it and all before
  // it are complete.
  void ready(Range range);
  // Everything has its final local value: sends what is left and waits.
  void finish();

 private:
  void send_next();

  const Rank* rank_;
  Tensor gradients_;
  std::vector<Range> buckets_;
  std::vector<std::int64_t> missing_;  // elements of each bucket that are not ready
  std::size_t next_ = 0;
  std::vector<Pending> under_way_;
};

}  // namespace echelon
