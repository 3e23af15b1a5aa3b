// Synchronous data parallelism: every dp rank computes its own samples, gradients are summed over dp, every
// rank takes the same step. Gradients are scaled by 1/(target tokens of the global batch) where the loss is,
// so a sum is all that is needed. Buckets (Li et al. 2020, PyTorch DDP, https://arxiv.org/abs/2006.15704):
// the sum of what the backward pass has finished goes on while the rest of it runs.
//
// Bytes sent per rank and step: 2(d-1)/d of the gradients where each rank keeps the whole sum (all_reduce),
// (d-1)/d where the sum is cut over the ranks (ZeRO, see zero.h: reduce_scatter). Where it is cut over blocks
// of s = d/n ranks, with n replicas of each shard (HSDP): (s-1)/s, and 2(n-1)/n of a shard.
#pragma once

#include <vector>

#include "base/split.h"
#include "comm/rank.h"
#include "parallel/compression.h"
#include "spec/plan.h"

namespace echelon {

// Where the gradients of a bucket are that is summed as one.
struct BucketTensors {
  Range range;   // in the flat order of the rank's parameters
  Tensor whole;  // what this rank has added up
  // ZeRO: where this rank's part of the sum goes. Undefined: the sum takes the place of `whole`.
  Tensor own;
  // The memory of `own` is taken when the sum begins, that of `whole` goes when it has ended.
  bool comes_and_goes = false;
};

// The reduction of one step's gradients.
class DataParallel {
 public:
  // `reducer`: of these buckets, over the groups() below; `step` as it wants it; `shards`: ranks of a block.
  // Buckets are sent in their order.
  DataParallel(const Rank& rank, int shards, GradientReducer& reducer, std::int64_t step,
               std::vector<BucketTensors> buckets);
  // The ranks that a bucket is summed over before its shards are summed over the blocks.
  static ReductionGroups groups(const Rank& rank, const Plan& plan);

  // The range has its final local value. A bucket is sent as soon as it and all before it are complete. Where
  // memory comes and goes, one reduction is under way at a time: the one before is waited for.
  void ready(Range range);
  // Everything has its final local value: sends what is left and waits.
  void finish();

 private:
  void send_next();
  bool finish_oldest();

  const Rank* rank_;
  int shards_;
  GradientReducer* reducer_;
  std::int64_t step_;
  std::vector<BucketTensors> buckets_;
  std::vector<std::int64_t> missing_;  // elements of each bucket that are not ready
  std::size_t next_ = 0;
  std::vector<Pending> across_blocks_;
};

}  // namespace echelon
