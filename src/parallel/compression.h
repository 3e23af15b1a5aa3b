// Sums gradients over the data-parallel group, compressed during communication. spec/compression.h has the
// methods as data: their parameters, their bytes and the rule that they all obey.
//
//   none      one all_reduce (or reduce_scatter) of the bucket
//   bf16, fp16, int8   compression_quantize.cpp: each rank sums its part of all ranks' packed elements
//   topk      compression_topk.cpp: sends the largest elements, carries the rest over
//   powersgd  compression_powersgd.cpp: sends two thin factors of each matrix, carries the rest over
//
// Sums are computed in the run's float type, in rank order, and every rank ends with the same bits.
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

// State that a method carries from step to step, for checkpoints.
struct CarriedTensor {
  std::string parameter;
  int slice = 0;  // see GradientSection
  // "residual": what this rank has not sent yet, in the parameter's local shape (rows, cols). Only its sum
  // over the dp group matters (residual_sources()). "factor": PowerSGD's right factor (R, cols), the same on
  // every dp rank. It is only the start of the next approximation, so another mesh may begin without it.
  std::string what;
  Tensor tensor;
};

// When `saved_size` dp ranks saved residuals: the old ranks whose residuals rank `rank` of `size` sums as its
// own. The total stays the same, and with an equal number of ranks each gets its own back.
std::vector<int> residual_sources(int rank, int size, int saved_size);

// The groups over which buckets are summed: ranks that hold the same parameters, and ranks that hold the same
// routed experts.
struct ReductionGroups {
  Communicator &all, &experts;
};

// The reductions of one rank's buckets, step after step.
class GradientReducer {
 public:
  // `groups`, `kernels` and `arena` outlive it. `seed`: the run's. Allocates all the memory that it will
  // need. A group of one has no communication, so nothing is compressed.
  GradientReducer(const ReductionGroups& groups, Kernels& kernels, Arena& arena, DType dtype,
                  const Compression& compression, std::uint64_t seed, std::vector<GradientBucket> buckets);
  ~GradientReducer();
  GradientReducer(GradientReducer&&) noexcept;
  GradientReducer& operator=(GradientReducer&&) noexcept;

  // Starts the reduction of a bucket in step `step` (0 for the first); every rank starts the same buckets in
  // the same order. `gradient`: the bucket's elements. After finish() it holds the sum; for a bucket with
  // shards `shard` holds this rank's part of the sum, and `gradient` is garbage. Never waits for another
  // rank.
  void begin(std::size_t bucket, std::int64_t step, const Tensor& gradient, const Tensor& shard = {});
  // Lets pending communication advance.
  void progress();
  // Waits until the bucket that was started first is reduced, and returns it; empty if none is pending. By
  // then every rank must have started the same buckets.
  std::optional<std::size_t> finish_oldest();
  // Waits until every started bucket is reduced.
  void finish();

  // Views of the carried state, to save it, or to fill it in between two steps.
  std::vector<CarriedTensor> carried() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
