// Quantized all-reduce: gradients travel in 16 or 8 bits and are added in full precision.
//   bf16, fp16  Micikevicius et al. 2018, Mixed Precision Training, https://arxiv.org/abs/1710.03740. fp16
//   has a
//               power of two for each block of 256 elements in the place of a loss scale.
//   int8        Alistarh et al. 2017, QSGD, https://arxiv.org/abs/1610.02132: rounding at random, so that the
//               sum's expected value is right and nothing needs to be carried over; absolute maximum of a
//               block as in Dettmers 2016, https://arxiv.org/abs/1511.04561.
//
// A sum of packed numbers taken hop by hop would round at every hop. Here every rank owns a part of the
// bucket:
// 1. all_to_all: everybody's packed elements of my part, which I unpack and add in rank order;
// 2. all_gather: my sums, packed again. Each rank unpacks them all, its own too: the same bits everywhere.
// With shards there is no second step, and no second rounding.
// Bytes sent per rank: (n-1)/n of the packed bucket in each step.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/philox.h"
#include "parallel/compression_methods.h"
#include "tensor/codecs.h"
#include "tensor/reference_view.h"

namespace echelon {
namespace {

// Who rounds: a rank its own gradient, or the owner of a part the sum. The owner is not named, as who that is
// must not change the bits.
constexpr int owner_of_sum = -1;

// Where each section's random numbers come from. They are indexed by the element within the parameter.
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

// Packs the elements of `part` of the bucket that begins at x.
template <class F>
void pack(const ReductionContext& context, const GradientBucket& bucket, Range part,
          const std::vector<Philox>& rounding, const F* x, std::byte* out) {
  const CompressionKind kind = context.compression.kind;
  if (kind == CompressionKind::bf16) return encode_bf16(x + part.begin, part.size(), out);
  for_each_block(bucket, part, [&](const GradientSection& section, Range block, Range piece) {
    // Where a part ends within a block, both sides send the scale of the whole block.
    const auto largest = static_cast<double>(largest_magnitude(x + block.begin, block.size()));
    const float scale = kind == CompressionKind::fp16 ? fp16_scale(largest) : int8_scale(largest);
    std::memcpy(out, &scale, sizeof scale);
    out += sizeof scale;
    if (kind == CompressionKind::fp16) {
      encode_fp16(x + piece.begin, piece.size(), scale, out);
    } else {
      std::array<std::uint32_t, scale_block> random;
      rounding[static_cast<std::size_t>(&section - bucket.sections.data())].fill_words(
          static_cast<std::uint64_t>(piece.begin - section.range.begin),
          static_cast<std::uint64_t>(piece.size()), random.data());
      encode_int8(x + piece.begin, piece.size(), scale, random.data(), out);
    }
    out += piece.size() * quantized_element_bytes(kind);
  });
}

// y[i] = or += the packed element part.begin + i.
template <class F>
void unpack(const ReductionContext& context, const GradientBucket& bucket, Range part, const std::byte* in,
            bool accumulate, F* y) {
  const CompressionKind kind = context.compression.kind;
  if (kind == CompressionKind::bf16) return decode_bf16(in, part.size(), accumulate, y);
  for_each_block(bucket, part, [&](const GradientSection&, Range, Range piece) {
    float scale;
    std::memcpy(&scale, in, sizeof scale);
    in += sizeof scale;
    F* const to = y + (piece.begin - part.begin);
    if (kind == CompressionKind::fp16)
      decode_fp16(in, piece.size(), scale, accumulate, to);
    else
      decode_int8(in, piece.size(), scale, accumulate, to);
    in += piece.size() * quantized_element_bytes(kind);
  });
}

std::byte* bytes_at(const Tensor& payload, std::int64_t offset) {
  return static_cast<std::byte*>(payload.host_bytes()) + offset;
}

}  // namespace

QuantizedReduction::QuantizedReduction(const ReductionContext& context, const GradientBucket& bucket)
    : context_(context),
      bucket_(bucket),
      parts_(quantized_parts(context.compression.kind, bucket, context.group.size())) {
  for (const Range& part : parts_) sizes_.push_back(quantized_bytes(context.compression.kind, bucket, part));
  outgoing_ = context.payload(DType::u8, std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{0}));
  incoming_ = context.payload(DType::u8,
                              context.group.size() * sizes_[static_cast<std::size_t>(context.group.rank())]);
}

Range QuantizedReduction::payload_of(int rank) const {
  const auto own = sizes_.begin() + rank;
  const std::int64_t begin = std::accumulate(sizes_.begin(), own, std::int64_t{0});
  return {begin, begin + *own};
}

void QuantizedReduction::start(const Reduction& of) {
  const int n = context_.group.size(), me = context_.group.rank();
  const std::vector<Philox> rounding = rounding_of(context_, bucket_, of.step, me);
  with_float_type(of.gradient, [&](auto zero) {
    for (int rank = 0; rank < n; ++rank)
      pack(context_, bucket_, parts_[static_cast<std::size_t>(rank)], rounding,
           of.gradient.host<decltype(zero)>(), bytes_at(outgoing_, payload_of(rank).begin));
  });
  const std::vector<std::int64_t> mine(static_cast<std::size_t>(n), sizes_[static_cast<std::size_t>(me)]);
  pending_ = context_.group.all_to_all(outgoing_, sizes_, incoming_, mine);
}

void QuantizedReduction::advance(const Reduction& of) {
  pending_.wait();
  const int n = context_.group.size(), me = context_.group.rank();
  const Range part = parts_[static_cast<std::size_t>(me)], payload = payload_of(me);
  const bool whole = bucket_.shards.empty();
  with_float_type(of.gradient, [&](auto zero) {
    using F = decltype(zero);
    F* const sum = whole ? of.gradient.host<F>() + part.begin : of.shard.host<F>();
    for (int rank = 0; rank < n; ++rank)
      unpack(context_, bucket_, part, bytes_at(incoming_, rank * payload.size()), rank > 0, sum);
    if (whole)
      pack(context_, bucket_, part, rounding_of(context_, bucket_, of.step, owner_of_sum),
           of.gradient.host<F>(), bytes_at(outgoing_, payload.begin));
  });
  if (whole)
    pending_ = context_.group.all_gather(outgoing_.flat_range(payload.begin, payload.end), outgoing_, sizes_);
}

void QuantizedReduction::finish(const Reduction& of) {
  pending_.wait();
  if (!bucket_.shards.empty()) return;
  with_float_type(of.gradient, [&](auto zero) {
    using F = decltype(zero);
    for (int rank = 0; rank < context_.group.size(); ++rank) {
      const Range part = parts_[static_cast<std::size_t>(rank)];
      unpack(context_, bucket_, part, bytes_at(outgoing_, payload_of(rank).begin), false,
             of.gradient.host<F>() + part.begin);
    }
  });
}

}  // namespace echelon
