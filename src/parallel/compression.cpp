#include "parallel/compression.h"

#include <limits>
#include <utility>
#include <variant>

#include "base/error.h"
#include "parallel/compression_methods.h"

namespace echelon {

std::vector<int> residual_sources(int rank, int size, int saved_size) {
  std::vector<int> sources;
  for (int saved = rank; saved < saved_size; saved += size) sources.push_back(saved);
  return sources;
}

Tensor ReductionContext::carried_over(std::int64_t count) const {
  Tensor zeros(arena, MemoryCategory::optimizer, dtype, {count});
  kernels.fill(zeros, 0);
  return zeros;
}

void ReductionContext::keep_shard(const GradientBucket& bucket, const BucketReduction& of) const {
  if (bucket.shards.empty()) return;
  std::int64_t begin = 0;
  for (int rank = 0; rank < group.rank(); ++rank) begin += bucket.shards[static_cast<std::size_t>(rank)];
  const Tensor sum = of.gradient.flat_range(begin, begin + of.shard.numel());
  if (!sum.begins_with(of.shard)) kernels.copy(sum, of.shard.flat());  // else its place inside the gradient
}

Tensor matrix_of(const Tensor& bucket, const GradientSection& section) {
  return bucket.flat_range(section.range.begin, section.range.end).reshape({section.rows, section.cols});
}

void WholeReduction::start(const BucketReduction& of) {
  pending_ = bucket_.shards.empty() ? context_.group.all_reduce(of.gradient)
                                    : context_.group.reduce_scatter(of.gradient, of.shard, bucket_.shards);
}

namespace {

using Method = std::variant<WholeReduction, QuantizedReduction, TopKReduction, LowRankReduction>;

Method make_method(const ReductionContext& context, const GradientBucket& bucket) {
  switch (context.group.size() == 1 ? CompressionKind::none : context.compression.kind) {
    case CompressionKind::none:
      break;
    case CompressionKind::bf16:
    case CompressionKind::fp16:
    case CompressionKind::int8:
      return QuantizedReduction(context, bucket);
    case CompressionKind::topk:
      return TopKReduction(context, bucket);
    case CompressionKind::powersgd:
      return LowRankReduction(context, bucket);
  }
  return WholeReduction(context, bucket);
}

void check_bucket(const ReductionContext& context, const GradientBucket& bucket) {
  std::int64_t end = 0;
  for (const GradientSection& s : bucket.sections) {
    check(s.range.begin == end && s.range.size() > 0 && s.range.size() == s.rows * s.cols,
          "the sections of a bucket follow each other");
    end = s.range.end;
  }
  if (!bucket.shards.empty()) {
    check(bucket.shards.size() == static_cast<std::size_t>(context.group.size()), "one shard for each rank");
    for (std::int64_t shard : bucket.shards) {
      check(shard >= 0, "a shard is no fewer than no elements");
      end -= shard;
    }
    check(end == 0, "the shards of a bucket fill it");
  }
  if (context.compression.kind == CompressionKind::topk &&
      bucket.numel() > std::numeric_limits<std::int32_t>::max())
    refuse(
        "--compress {}: the gradients from {} to {} are reduced as one bucket of {} elements, more than the "
        "{} that an index of 32 bits reaches; legal: a larger --tp or --pp, or another method",
        compression_text(context.compression), bucket.sections.front().name, bucket.sections.back().name,
        bucket.numel(), std::numeric_limits<std::int32_t>::max());
}

}  // namespace

struct GradientReducer::State {
  ReductionContext all, experts;
  std::vector<GradientBucket> buckets;
  std::vector<Method> methods;         // of each bucket
  std::vector<BucketReduction> under_way{};  // in the order of begin()
  const ReductionContext& context(const GradientBucket& bucket) const {
    return bucket.experts ? experts : all;
  }
};

GradientReducer::GradientReducer(const ReductionGroups& groups, Kernels& kernels, Arena& arena, DType dtype,
                                 const Compression& compression, std::uint64_t seed,
                                 std::vector<GradientBucket> buckets)
    : state_(new State{{groups.all, kernels, arena, dtype, compression, seed},
                       {groups.experts, kernels, arena, dtype, compression, seed},
                       std::move(buckets),
                       {}}) {
  for (const GradientBucket& bucket : state_->buckets) {
    check_bucket(state_->context(bucket), bucket);
    state_->methods.push_back(make_method(state_->context(bucket), bucket));
  }
}

GradientReducer::~GradientReducer() = default;
GradientReducer::GradientReducer(GradientReducer&&) noexcept = default;
GradientReducer& GradientReducer::operator=(GradientReducer&&) noexcept = default;

void GradientReducer::begin(std::size_t bucket, std::int64_t step, const Tensor& gradient,
                            const Tensor& shard) {
  const GradientBucket& shape = state_->buckets.at(bucket);
  const ReductionContext& context = state_->context(shape);
  for (const BucketReduction& other : state_->under_way)
    check(other.bucket != bucket, "a bucket is reduced once at a time");
  check(gradient.numel() == shape.numel() && gradient.dtype() == context.dtype,
        "a gradient has its bucket's size and type");
  if (!shape.shards.empty())
    check(shard.numel() == shape.shards[static_cast<std::size_t>(context.group.rank())] &&
              shard.dtype() == context.dtype,
          "a shard has its bucket's size and type");
  state_->under_way.push_back({.bucket = bucket, .step = step, .gradient = gradient.flat(), .shard = shard});
  std::visit([&](auto& method) { method.start(state_->under_way.back()); }, state_->methods[bucket]);
}

void GradientReducer::progress() {
  for (const BucketReduction& of : state_->under_way)
    std::visit([](auto& method) { method.progress(); }, state_->methods[of.bucket]);
}

std::optional<std::size_t> GradientReducer::finish_oldest() {
  if (state_->under_way.empty()) return {};
  // All second halves are on their way before the first one is waited for.
  for (BucketReduction& of : state_->under_way)
    if (!std::exchange(of.advanced, true))
      std::visit([&](auto& method) { method.advance(of); }, state_->methods[of.bucket]);
  const BucketReduction oldest = state_->under_way.front();
  std::visit([&](auto& method) { method.finish(oldest); }, state_->methods[oldest.bucket]);
  state_->under_way.erase(state_->under_way.begin());
  return oldest.bucket;
}

void GradientReducer::finish() {
  while (finish_oldest()) {
  }
}

std::vector<CarriedTensor> GradientReducer::carried() const {
  std::vector<CarriedTensor> list;
  for (const Method& method : state_->methods)
    std::visit([&](const auto& of) { of.list_carried(list); }, method);
  return list;
}

}  // namespace echelon
