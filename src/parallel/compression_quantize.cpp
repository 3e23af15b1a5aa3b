// Quantized all-reduce: gradients travel in 16 or 8 bits and are summed in full precision.
//   bf16, fp16  Micikevicius et al. 2018, Mixed Precision Training, https://arxiv.org/abs/1710.03740. fp16
//               has a power of two for each block of 256 elements instead of a loss scale.
//   int8        Alistarh et al. 2017, QSGD, https://arxiv.org/abs/1610.02132: stochastic rounding, so the
//               sum is unbiased and nothing needs to be carried over; scaled by the absolute maximum of a
//               block, as in Dettmers 2016, https://arxiv.org/abs/1511.04561.
//
// Summing packed numbers hop by hop would round at every hop. Instead every rank owns a part of the bucket:
// 1. all_to_all: it receives all ranks' packed elements of its part, unpacks them and sums in rank order;
// 2. all_gather: it sends these sums, packed again. Each rank unpacks all of them, its own too, so that all
//    have the same bits.
// With shards there is no second step and no second rounding. Bytes sent per rank: (n-1)/n of the packed
// bucket in each step.
#include <fmt/format.h>

#include <numeric>

#include "base/error.h"
#include "base/philox.h"
#include "base/split.h"
#include "parallel/compression_methods.h"

namespace echelon {
namespace {

// Who rounds: a rank its own gradient, or the owner of a part the sum. All owners share one number, since who
// owns a part must not change the bits.
constexpr int owner_of_sum = -1;

// The random generators of the sections. They are indexed by the element within the parameter.
std::vector<Philox> rounding_of(const ReductionContext& context, const GradientBucket& bucket,
                                std::int64_t step, int who) {
  std::vector<Philox> generators;
  if (context.compression.kind == CompressionKind::int8)
    for (const GradientSection& s : bucket.sections)
      generators.emplace_back(
          context.seed, Stream::rounding,
          name_hash(fmt::format("{} slice {} step {} rank {}", s.name, s.slice, step, who).c_str()));
  return generators;
}

}  // namespace

QuantizedReduction::QuantizedReduction(const ReductionContext& context, const GradientBucket& bucket)
    : context_(context),
      bucket_(bucket),
      parts_(quantized_parts(context.compression.kind, bucket, context.group.size())) {
  for (const Range& part : parts_) sizes_.push_back(quantized_bytes(context.compression.kind, bucket, part));
  outgoing_ = context.payload(DType::u8, sum_of(sizes_));
  incoming_ = context.payload(DType::u8,
                              context.group.size() * sizes_[static_cast<std::size_t>(context.group.rank())]);
}

Range QuantizedReduction::payload_of(int rank) const {
  const auto own = sizes_.begin() + rank;
  const std::int64_t begin = std::accumulate(sizes_.begin(), own, std::int64_t{0});
  return {begin, begin + *own};
}

Tensor QuantizedReduction::outgoing(int rank) const {
  const Range payload = payload_of(rank);
  return outgoing_.flat_range(payload.begin, payload.end);
}

void QuantizedReduction::start(const BucketReduction& of) {
  const int n = context_.group.size(), me = context_.group.rank();
  const std::vector<Philox> rounding = rounding_of(context_, bucket_, of.step, me);
  for (int rank = 0; rank < n; ++rank)
    context_.kernels.pack_gradient(context_.compression.kind, bucket_, parts_[static_cast<std::size_t>(rank)],
                                   rounding, of.gradient.flat(), outgoing(rank));
  const std::vector<std::int64_t> mine(static_cast<std::size_t>(n), sizes_[static_cast<std::size_t>(me)]);
  pending_ = context_.group.all_to_all(outgoing_, sizes_, incoming_, mine);
}

void QuantizedReduction::advance(const BucketReduction& of) {
  pending_.wait();
  const int n = context_.group.size(), me = context_.group.rank();
  const Range part = parts_[static_cast<std::size_t>(me)], payload = payload_of(me);
  const bool whole = bucket_.shards.empty();
  Kernels& kernels = context_.kernels;
  const CompressionKind kind = context_.compression.kind;
  const Tensor sum = whole ? of.gradient.flat_range(part.begin, part.end) : of.shard.flat();
  for (int rank = 0; rank < n; ++rank)
    kernels.unpack_gradient(kind, bucket_, part,
                            incoming_.flat_range(rank * payload.size(), (rank + 1) * payload.size()),
                            rank > 0, sum);
  if (whole)
    kernels.pack_gradient(kind, bucket_, part, rounding_of(context_, bucket_, of.step, owner_of_sum),
                          of.gradient.flat(), outgoing(me));
  if (whole) pending_ = context_.group.all_gather(outgoing(me), outgoing_, sizes_);
}

void QuantizedReduction::finish(const BucketReduction& of) {
  pending_.wait();
  if (!bucket_.shards.empty()) return;
  for (int rank = 0; rank < context_.group.size(); ++rank) {
    const Range part = parts_[static_cast<std::size_t>(rank)];
    context_.kernels.unpack_gradient(context_.compression.kind, bucket_, part, outgoing(rank), false,
                                     of.gradient.flat_range(part.begin, part.end));
  }
}

}  // namespace echelon
