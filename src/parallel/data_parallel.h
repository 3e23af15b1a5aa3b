// Synchronous data parallelism: every dp rank computes its own samples, gradients are summed over dp, and
// every rank takes the same optimizer step. The loss is already scaled by 1/(target tokens of the global
// batch), so a plain sum is right. Gradients are reduced in buckets (Li et al. 2020, PyTorch DDP,
// https://arxiv.org/abs/2006.15704), so that the reduction of finished gradients overlaps with the rest of
// the backward pass.
//
// Bytes sent per rank and step: 2(d-1)/d of the gradients if each rank keeps the whole sum (all_reduce),
// (d-1)/d if the sum is sharded over the ranks (ZeRO, zero.h: reduce_scatter). If it is sharded over blocks
// of s = d/n ranks, with n replicas of each shard (HSDP): (s-1)/s, and 2(n-1)/n of a shard.
#pragma once

#include <vector>

#include "base/split.h"
#include "comm/rank.h"
#include "parallel/compression.h"
#include "spec/plan.h"

namespace echelon {

// The tensors of one bucket of gradients.
struct BucketTensors {
  Range range;   // in the flat order of the rank's parameters
  Tensor whole;  // what this rank has accumulated
  // ZeRO: receives this rank's shard of the sum. Undefined: the sum overwrites `whole`.
  Tensor own;
  // The memory of `own` is allocated when the reduction begins, and that of `whole` is freed when it ends.
  bool comes_and_goes = false;
};

// The reduction of one step's gradients.
class DataParallel {
 public:
  // `reducer`: for these buckets, over groups() below; `step` is passed on to it; `shards`: ranks of a block.
  // Buckets are reduced in their order.
  DataParallel(const Rank& rank, int shards, GradientReducer& reducer, std::int64_t step,
               std::vector<BucketTensors> buckets);
  // The groups over which a bucket is summed, before its shards are summed across blocks.
  static ReductionGroups groups(const Rank& rank, const Plan& plan);

  // Announces that the range has its final local value. A bucket's reduction starts as soon as it and all
  // buckets before it are complete. If memory is allocated and freed (comes_and_goes), only one reduction is
  // pending at a time: the one before is waited for.
  void ready(Range range);
  // Announces that everything has its final local value: starts what is left and waits for all.
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
