// The methods behind GradientReducer, one object per bucket. A reduction has three phases: start() never
// waits; advance() waits for what start() posted and may post more; finish() waits for that. Every rank posts
// its collectives in the same phase, so that they are in the same order everywhere.
#pragma once

#include <string>
#include <vector>

#include "parallel/compression.h"

namespace echelon {

// The reduction of one bucket in one step.
struct BucketReduction {
  std::size_t bucket = 0;
  std::int64_t step = 0;
  Tensor gradient, shard;  // as given to GradientReducer::begin()
  bool advanced = false;
};

struct ReductionContext {
  Communicator& group;
  Kernels& kernels;
  Arena& arena;
  DType dtype;
  Compression compression;
  std::uint64_t seed;

  Tensor payload(DType type, std::int64_t count) const {
    return {arena, MemoryCategory::communication, type, {count}};
  }
  Tensor carried_over(std::int64_t count) const;  // zeros
  // Copies this rank's shard out of the whole sum; does nothing for a bucket without shards.
  void keep_shard(const GradientBucket& bucket, const BucketReduction& of) const;
};

// The elements of a section as a matrix.
Tensor matrix_of(const Tensor& bucket, const GradientSection& section);

class WholeReduction {
 public:
  WholeReduction(const ReductionContext& context, const GradientBucket& bucket)
      : context_(context), bucket_(bucket) {}
  void start(const BucketReduction& of);
  void progress() { pending_.progress(); }
  void advance(const BucketReduction&) {}
  void finish(const BucketReduction&) { pending_.wait(); }
  void list_carried(std::vector<CarriedTensor>&) const {}

 private:
  const ReductionContext& context_;
  const GradientBucket& bucket_;
  Pending pending_;
};

class QuantizedReduction {
 public:
  QuantizedReduction(const ReductionContext& context, const GradientBucket& bucket);
  void start(const BucketReduction& of);
  void progress() { pending_.progress(); }
  void advance(const BucketReduction& of);
  void finish(const BucketReduction& of);
  void list_carried(std::vector<CarriedTensor>&) const {}

 private:
  Range payload_of(int rank) const;  // bytes of outgoing_
  Tensor outgoing(int rank) const;

  const ReductionContext& context_;
  const GradientBucket& bucket_;
  std::vector<Range> parts_;         // elements that each rank sums
  std::vector<std::int64_t> sizes_;  // bytes of each part when packed
  Tensor outgoing_, incoming_;
  Pending pending_;
};

class TopKReduction {
 public:
  TopKReduction(const ReductionContext& context, const GradientBucket& bucket);
  void start(const BucketReduction& of);
  void progress();
  void advance(const BucketReduction&) {}
  void finish(const BucketReduction& of);
  void list_carried(std::vector<CarriedTensor>& list) const;

 private:
  const ReductionContext& context_;
  const GradientBucket& bucket_;
  std::int64_t kept_ = 0;    // elements of the bucket that each rank sends
  Tensor residual_;          // of the bucket
  Tensor values_, indices_;  // of all ranks, in rank order
  Pending values_pending_, indices_pending_;
};

class LowRankReduction {
 public:
  LowRankReduction(const ReductionContext& context, const GradientBucket& bucket);
  void start(const BucketReduction& of);
  void progress();
  void advance(const BucketReduction& of);
  void finish(const BucketReduction& of);
  void list_carried(std::vector<CarriedTensor>& list) const;

 private:
  struct Factored {
    const GradientSection* section;
    Tensor residual;  // (rows, cols)
    Tensor p, q;      // (R, rows), (R, cols)
  };
  void orthonormalize(const Factored& matrix, const Tensor& factor, const std::string& when) const;
  void copy_rest(const Tensor& gradient, bool pack) const;

  const ReductionContext& context_;
  const GradientBucket& bucket_;
  std::vector<Factored> matrices_;
  Tensor p_, q_, rest_;      // of all matrices; rest_: what is not factored
  WholeReduction warmup_;    // also used if the bucket has no matrix worth factoring
  bool compressed_ = false;  // this step
  Pending factor_pending_, rest_pending_;
};

}  // namespace echelon
