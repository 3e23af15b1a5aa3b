#include "comm/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

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

// Pointers come with their offsets applied by `from` and `to`. Every vector is loaded from all sources before
// it is stored anywhere, so that destinations may be sources.
void sum_f32(std::span<const std::byte* const> sources, std::int64_t from,
             std::span<std::byte* const> destinations, std::int64_t to, std::int64_t count) {
  const hn::ScalableTag<float> tag;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  const auto source = [&](std::size_t k) { return reinterpret_cast<const float*>(sources[k]) + from; };
  const auto destination = [&](std::size_t k) { return reinterpret_cast<float*>(destinations[k]) + to; };
  const float* const first = source(0);
  std::int64_t i = 0;
  if (sources.size() == 2 && destinations.size() <= 2) {
    // Two ranks: one fused pass, two reads and two writes, all pointers in registers.
    const float* const second = source(1);
    float* const out = destination(0);
    float* const other = destination(destinations.size() - 1);
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      const auto sum0 = hn::Add(hn::LoadU(tag, first + i), hn::LoadU(tag, second + i));
      const auto sum1 = hn::Add(hn::LoadU(tag, first + i + lanes), hn::LoadU(tag, second + i + lanes));
      hn::StoreU(sum0, tag, out + i);
      hn::StoreU(sum1, tag, out + i + lanes);
      if (other == out) continue;
      hn::StoreU(sum0, tag, other + i);
      hn::StoreU(sum1, tag, other + i + lanes);
    }
  }
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    auto sum0 = hn::LoadU(tag, first + i);
    auto sum1 = hn::LoadU(tag, first + i + lanes);
    auto sum2 = hn::LoadU(tag, first + i + 2 * lanes);
    auto sum3 = hn::LoadU(tag, first + i + 3 * lanes);
    for (std::size_t k = 1; k < sources.size(); ++k) {
      const float* const next = source(k) + i;
      sum0 = hn::Add(sum0, hn::LoadU(tag, next));
      sum1 = hn::Add(sum1, hn::LoadU(tag, next + lanes));
      sum2 = hn::Add(sum2, hn::LoadU(tag, next + 2 * lanes));
      sum3 = hn::Add(sum3, hn::LoadU(tag, next + 3 * lanes));
    }
    for (std::size_t k = 0; k < destinations.size(); ++k) {
      float* const out = destination(k) + i;
      hn::StoreU(sum0, tag, out);
      hn::StoreU(sum1, tag, out + lanes);
      hn::StoreU(sum2, tag, out + 2 * lanes);
      hn::StoreU(sum3, tag, out + 3 * lanes);
    }
  }
  for (; i < count; ++i) {
    float sum = first[i];
    for (std::size_t k = 1; k < sources.size(); ++k) sum += source(k)[i];
    for (std::size_t k = 0; k < destinations.size(); ++k) destination(k)[i] = sum;
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
HWY_EXPORT(sum_f32);
HWY_EXPORT(stream_copy);

namespace {

template <class T>
T combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::max) return (a < b || b != b) ? b : a;
  if constexpr (std::is_integral_v<T>) {
    // Unsigned, because signed overflow is undefined.
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <class T, ReduceOp op>
void reduce_plain(std::span<const std::byte* const> sources, std::int64_t from,
                  std::span<std::byte* const> destinations, std::int64_t to, std::int64_t count) {
  // A block on the stack: it stays in the first-level cache, and cannot be one of the sources.
  constexpr std::int64_t block = 1024;
  std::array<T, block> sum;
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const auto length = static_cast<std::size_t>(std::min(block, count - begin));
    std::memcpy(sum.data(), reinterpret_cast<const T*>(sources[0]) + from + begin, length * sizeof(T));
    for (std::size_t k = 1; k < sources.size(); ++k) {
      const T* const source = reinterpret_cast<const T*>(sources[k]) + from + begin;
      for (std::size_t i = 0; i < length; ++i) sum[i] = combine<T>(op, sum[i], source[i]);
    }
    for (std::byte* destination : destinations)
      std::memcpy(reinterpret_cast<T*>(destination) + to + begin, sum.data(), length * sizeof(T));
  }
}

template <class T>
void reduce_plain(ReduceOp op, std::span<const std::byte* const> sources, std::int64_t from,
                  std::span<std::byte* const> destinations, std::int64_t to, std::int64_t count) {
  if (op == ReduceOp::sum) return reduce_plain<T, ReduceOp::sum>(sources, from, destinations, to, count);
  reduce_plain<T, ReduceOp::max>(sources, from, destinations, to, count);
}

}  // namespace

void reduce_elements(ReduceOp op, DType dtype, std::span<const std::byte* const> sources,
                     std::int64_t source_begin, std::span<std::byte* const> destinations,
                     std::int64_t destination_begin, std::int64_t count) {
  if (count == 0 || destinations.empty()) return;
  if (dtype == DType::f32 && op == ReduceOp::sum)
    return HWY_DYNAMIC_DISPATCH(sum_f32)(sources, source_begin, destinations, destination_begin, count);
  switch (dtype) {
    case DType::f32:
      return reduce_plain<float>(op, sources, source_begin, destinations, destination_begin, count);
    case DType::f64:
      return reduce_plain<double>(op, sources, source_begin, destinations, destination_begin, count);
    case DType::i32:
      return reduce_plain<std::int32_t>(op, sources, source_begin, destinations, destination_begin, count);
  }
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
