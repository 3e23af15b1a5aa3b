// The sum of gradients over the data-parallel group, compressed on the wire. spec/compression.h has the
// methods as data: their parameters, their bytes, the one law.
//
//   none      one all_reduce (or reduce_scatter) of the bucket
//   bf16, fp16, int8   compression_quantize.cpp: each rank sums its part of everybody's packed elements
//   topk      compression_topk.cpp: the largest elements, the rest is carried over
//   powersgd  compression_powersgd.cpp: two thin factors of each matrix, the rest is carried over
//
// Sums are taken in the run's float type, in rank order, and every rank ends with the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "spec/compression.h"
#include "tensor/kernels.h"

namespace echelon {

// A tensor that a method carries from step to step, for checkpoints.
struct CarriedTensor {
  std::string parameter;
  int slice = 0;  // see GradientSection
  // "residual": what this rank has not sent yet, in the parameter's local shape (rows, cols); the sum over
  // the dp group is what matters (residual_sources()). "factor": PowerSGD's right factor (R, cols), the same
  // on every dp rank. Only where the next approximation starts from: another mesh may start afresh.
  std::string what;
  Tensor tensor;
};

// The old dp ranks whose residuals dp rank `rank` of `size` adds up as its own, when `saved_size` ranks saved
// them: their sum stays what it was, and on as many ranks each gets its own back.
std::vector<int> residual_sources(int rank, int size, int saved_size);

// The ranks that buckets are summed over: those that hold the same, and the same routed experts.
struct ReductionGroups {
  Communicator &all, &experts;
};

// The reductions of one rank's buckets, step after step.
class GradientReducer {
 public:
  // `groups`, `kernels` and `arena` outlive it. On a group of one nothing travels, so nothing is compressed.
  // Allocates all it will need. `seed`: the run's.
  GradientReducer(const ReductionGroups& groups, Kernels& kernels, Arena& arena, DType dtype,
                  const Compression& compression, std::uint64_t seed, std::vector<GradientBucket> buckets);
  ~GradientReducer();
  GradientReducer(GradientReducer&&) noexcept;
  GradientReducer& operator=(GradientReducer&&) noexcept;

  // Starts the reduction of a bucket in step `step` (0 for the first); every rank starts the same buckets in
  // the same order. `gradient`: the bucket's elements. After finish() it holds the sum; in a bucket with
  // shards `shard` does, and `gradient` holds nothing of use. Never waits for another rank.
  void begin(std::size_t bucket, std::int64_t step, const Tensor& gradient, const Tensor& shard = {});
  // Lets what is under way advance.
  void progress();
  // Waits until the bucket that was begun first is reduced; returns it, or nothing when none is under way.
  // Every rank has begun the same ones by then.
  std::optional<std::size_t> finish_oldest();
  // Waits until every bucket that was begun is reduced.
  void finish();

  // Views of what is carried over, to be saved, or filled in between two steps.
  std::vector<CarriedTensor> carried() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
