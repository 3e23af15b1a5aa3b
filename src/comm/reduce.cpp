#include "comm/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/halving_tree.h"

// Highway compiles this file once for every instruction set and takes the best at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "comm/reduce.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h, and not to be sorted above it.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The most sources of one pass over the elements, by stored type. Each further one means more code for every
// instruction set; training mostly waits for sums of f32.
constexpr std::size_t most_fused(ReduceOp op, DType from, DType to) {
  return from != to && to == DType::bf16 ? 2 : op == ReduceOp::sum && from == DType::f32 ? 16 : 4;
}

template <class Tag>
HWY_INLINE hn::Vec<Tag> load(Tag tag, const hn::TFromD<Tag>* at) {
  return hn::LoadU(tag, at);
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> load(Tag tag, const bf16* at) {
  const hn::Rebind<std::uint16_t, Tag> upper;
  const hn::RebindToUnsigned<Tag> whole;
  const auto bits = hn::LoadU(upper, reinterpret_cast<const std::uint16_t*>(at));
  return hn::BitCast(tag, hn::ShiftLeft<16>(hn::PromoteTo(whole, bits)));
}

template <class Tag>
HWY_INLINE void store(hn::Vec<Tag> x, Tag tag, hn::TFromD<Tag>* at) {
  hn::StoreU(x, tag, at);
}
// As bf16(float) rounds.
template <class Tag>
HWY_INLINE void store(hn::Vec<Tag> x, Tag tag, bf16* at) {
  const hn::Rebind<std::uint16_t, Tag> upper;
  const hn::RebindToUnsigned<Tag> whole;
  const auto bits = hn::BitCast(whole, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(whole, 1u));
  const auto nearest = hn::Add(bits, hn::Add(odd, hn::Set(whole, 0x7fffu)));
  const auto nan = hn::Or(bits, hn::Set(whole, 0x400000u));
  const auto rounded = hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(whole, hn::IsNaN(x)), nan, nearest));
  hn::StoreU(hn::DemoteTo(upper, hn::BitCast(hn::RebindToSigned<Tag>(), rounded)), upper,
             reinterpret_cast<std::uint16_t*>(at));
  static_cast<void>(tag);
}

template <ReduceOp op, class V>
HWY_INLINE V combine(V a, V b) {
  if constexpr (op == ReduceOp::sum)
    return hn::Add(a, b);
  else if constexpr (hwy::IsFloat<hn::TFromV<V>>())
    return hn::IfThenElse(hn::Or(hn::Lt(a, b), hn::IsNaN(b)), b, a);
  else
    return hn::Max(a, b);
}

// Element or vector i of n sources, reduced by halves. n is known at compile time, so that everything stays
// in registers.
template <ReduceOp op, std::size_t n, class Tag, class From>
HWY_INLINE hn::Vec<Tag> reduced_at(Tag tag, const From* const* sources, std::int64_t i) {
  if constexpr (n == 1) {
    return load(tag, sources[0] + i);
  } else {
    constexpr std::size_t cut = halving_cut(std::size_t{0}, n);
    return combine<op>(reduced_at<op, cut>(tag, sources, i), reduced_at<op, n - cut>(tag, sources + cut, i));
  }
}

// Every vector is loaded from all sources before it is stored anywhere, so that destinations may be sources.
template <ReduceOp op, std::size_t n, class From, class To>
void reduce_sources(const From* const* sources, std::span<std::byte* const> destinations, std::int64_t to,
                    std::int64_t count) {
  const hn::ScalableTag<Wide<From>> tag;
  const hn::CappedTag<Wide<From>, 1> one;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  const auto destination = [&](std::size_t k) { return reinterpret_cast<To*>(destinations[k]) + to; };
  std::int64_t i = 0;
  if (n == 2 && destinations.size() <= 2) {
    // Two ranks: two reads and two writes, all pointers in registers.
    const From* const pair[2] = {sources[0], sources[n - 1]};
    To* const out = destination(0);
    To* const other = destination(destinations.size() - 1);
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      const auto x0 = reduced_at<op, 2>(tag, pair, i), x1 = reduced_at<op, 2>(tag, pair, i + lanes);
      store(x0, tag, out + i);
      store(x1, tag, out + i + lanes);
      if (other == out) continue;
      store(x0, tag, other + i);
      store(x1, tag, other + i + lanes);
    }
  }
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const auto x0 = reduced_at<op, n>(tag, sources, i), x1 = reduced_at<op, n>(tag, sources, i + lanes);
    const auto x2 = reduced_at<op, n>(tag, sources, i + 2 * lanes);
    const auto x3 = reduced_at<op, n>(tag, sources, i + 3 * lanes);
    for (std::size_t k = 0; k < destinations.size(); ++k) {
      To* const out = destination(k) + i;
      store(x0, tag, out);
      store(x1, tag, out + lanes);
      store(x2, tag, out + 2 * lanes);
      store(x3, tag, out + 3 * lanes);
    }
  }
  for (; i < count; ++i) {
    const auto x = reduced_at<op, n>(one, sources, i);
    for (std::size_t k = 0; k < destinations.size(); ++k) store(x, one, destination(k) + i);
  }
}

template <ReduceOp op, class From, class To>
void reduce_typed(std::span<const std::byte* const> sources, std::int64_t from,
                  std::span<std::byte* const> destinations, std::int64_t to, std::int64_t count) {
  constexpr std::size_t most = HWY_NAMESPACE::most_fused(op, dtype_of<From>, dtype_of<To>);
  std::array<const From*, most> at{};
  for (std::size_t k = 0; k < sources.size(); ++k) at[k] = reinterpret_cast<const From*>(sources[k]) + from;
  const auto run = [&]<std::size_t... k>(std::index_sequence<k...>) {
    ((sources.size() == k + 1 ? reduce_sources<op, k + 1, From, To>(at.data(), destinations, to, count)
                              : void()),
     ...);
  };
  run(std::make_index_sequence<most>());
}

template <class From, class To>
void reduce_either(ReduceOp op, std::span<const std::byte* const> sources, std::int64_t from,
                   std::span<std::byte* const> destinations, std::int64_t to, std::int64_t count) {
  (op == ReduceOp::sum ? reduce_typed<ReduceOp::sum, From, To>
                       : reduce_typed<ReduceOp::max, From, To>)(sources, from, destinations, to, count);
}

// At most most_fused sources, of one dtype, to another of the same width when summed.
void reduce_fused(ReduceOp op, DType from, DType to, std::span<const std::byte* const> sources,
                  std::int64_t begin, std::span<std::byte* const> destinations,
                  std::int64_t destination_begin, std::int64_t count) {
  const auto run = [&](auto reduce) { reduce(op, sources, begin, destinations, destination_begin, count); };
  switch (from) {
    case DType::f32:
      return to == DType::bf16 ? run(reduce_either<float, bf16>) : run(reduce_either<float, float>);
    case DType::f64:
      return run(reduce_either<double, double>);
    case DType::bf16:
      return to == DType::bf16 ? run(reduce_either<bf16, bf16>) : run(reduce_either<bf16, float>);
    case DType::i32:
      return run(reduce_either<std::int32_t, std::int32_t>);
    case DType::i16:
    case DType::u8:
      throw InvariantError("neither packed bytes nor remainders have a sum");
  }
}

// One source to one destination, past the caches. The destination must not be the source.
void stream_copy(const std::byte* source, std::byte* destination, std::int64_t bytes) {
  const hn::ScalableTag<std::uint8_t> tag;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  const auto* from = reinterpret_cast<const std::uint8_t*>(source);
  auto* to = reinterpret_cast<std::uint8_t*>(destination);
  const auto past =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % static_cast<std::uintptr_t>(lanes));
  const std::int64_t head = std::min(bytes, past == 0 ? 0 : lanes - past);
  std::memcpy(to, from, static_cast<std::size_t>(head));
  std::int64_t i = head;
  for (; i + 4 * lanes <= bytes; i += 4 * lanes) {
    const auto a = hn::LoadU(tag, from + i), b = hn::LoadU(tag, from + i + lanes);
    const auto c = hn::LoadU(tag, from + i + 2 * lanes), d = hn::LoadU(tag, from + i + 3 * lanes);
    hn::Stream(a, tag, to + i);
    hn::Stream(b, tag, to + i + lanes);
    hn::Stream(c, tag, to + i + 2 * lanes);
    hn::Stream(d, tag, to + i + 3 * lanes);
  }
  std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace echelon {
HWY_EXPORT(reduce_fused);
HWY_EXPORT(stream_copy);
using HWY_NAMESPACE::most_fused;

namespace {

constexpr std::int64_t block_bytes = 4096;  // a few of them fit the first-level cache

// More sources than one pass takes: reduces both halves into blocks on the stack, then those; at most one
// block of elements. Partial sums are not rounded to a narrower type in between.
void reduce_block(ReduceOp op, DType from, DType to, std::span<const std::byte* const> sources,
                  std::int64_t begin, std::span<std::byte* const> destinations,
                  std::int64_t destination_begin, std::int64_t count) {
  if (sources.size() <= most_fused(op, from, to))
    return HWY_DYNAMIC_DISPATCH(reduce_fused)(op, from, to, sources, begin, destinations, destination_begin,
                                              count);
  const std::size_t cut = halving_cut(std::size_t{0}, sources.size());
  alignas(64) std::array<std::byte, block_bytes> left, right;
  const std::array<std::byte*, 1> to_left{left.data()}, to_right{right.data()};
  reduce_block(op, from, wide(from), sources.first(cut), begin, to_left, 0, count);
  reduce_block(op, from, wide(from), sources.subspan(cut), begin, to_right, 0, count);
  const std::array<const std::byte*, 2> halves{left.data(), right.data()};
  HWY_DYNAMIC_DISPATCH(reduce_fused)(op, wide(from), to, halves, 0, destinations, destination_begin, count);
}

}  // namespace

void reduce_elements(ReduceOp op, DType dtype, std::span<const std::byte* const> sources,
                     std::int64_t source_begin, std::span<std::byte* const> destinations,
                     std::int64_t destination_begin, std::int64_t count) {
  if (destinations.empty()) return;
  const std::int64_t step =
      sources.size() <= most_fused(op, dtype, dtype) ? count : block_bytes / element_bytes(wide(dtype));
  for (std::int64_t i = 0; i < count; i += step)
    reduce_block(op, dtype, dtype, sources, source_begin + i, destinations, destination_begin + i,
                 std::min(step, count - i));
}

void copy_bytes(const std::byte* source, std::span<std::byte* const> destinations,
                std::int64_t destination_begin, std::int64_t bytes, bool stream) {
  // The first destination brings a block into the first-level cache, the others find it there.
  constexpr std::int64_t block = 16 * 1024;
  for (std::int64_t begin = 0; begin < bytes; begin += block) {
    const std::int64_t length = std::min(block, bytes - begin);
    for (std::byte* destination : destinations) {
      std::byte* const to = destination + destination_begin + begin;
      if (to == source + begin) continue;
      if (stream)
        HWY_DYNAMIC_DISPATCH(stream_copy)(source + begin, to, length);
      else
        std::memcpy(to, source + begin, static_cast<std::size_t>(length));
    }
  }
  if (stream) hwy::FlushStream();
}

}  // namespace echelon
#endif  // HWY_ONCE
