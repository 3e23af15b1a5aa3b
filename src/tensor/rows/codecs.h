// Narrow formats of single numbers, and packed gradients as a whole (tensor/codecs.h describes them).
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/bf16.h"
#include "base/philox_words.h"
#include "spec/compression.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

ECHELON_HOST_DEVICE inline float narrow(float x) { return x; }
ECHELON_HOST_DEVICE inline float narrow(double x) { return rounded_to_odd(x); }

ECHELON_HOST_DEVICE inline std::uint16_t finite_bf16(float x) {
  constexpr std::uint32_t magnitude_mask = 0x7fffffffu, infinity_bits = 0x7f800000u;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & magnitude_mask;
  const std::uint32_t rounded = (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16;
  const std::uint32_t finite = rounded < 0x7f7fu ? rounded : 0x7f7fu;
  // Bit 6 prevents a NaN whose payload is only in the lower half from becoming infinity.
  const std::uint32_t other = magnitude >> 16 | (magnitude > infinity_bits ? 0x40u : 0u);
  return static_cast<std::uint16_t>((magnitude < infinity_bits ? finite : other) | (bits >> 16 & 0x8000u));
}
ECHELON_HOST_DEVICE inline float bf16_value(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// For |x| < 2^16.
ECHELON_HOST_DEVICE inline std::uint16_t half_of(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  // Next to 0.5 the last bit of an f32 is 2^-24, as for a half below 2^-14: the addition rounds.
  const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                              std::bit_cast<std::uint32_t>(0.5f);
  return static_cast<std::uint16_t>((magnitude < (113u << 23) ? small : normal) | (bits >> 16 & 0x8000u));
}
ECHELON_HOST_DEVICE inline float half_value(std::uint16_t half) {
  const std::uint32_t magnitude = (half & 0x7fffu) << 13;
  const float value = std::bit_cast<float>(magnitude) * 0x1p112f;  // exact, also below 2^-14
  return (half & 0x8000u) != 0 ? -value : value;
}

// The scale of a block with numbers that cannot be represented.
ECHELON_HOST_DEVICE inline float poison() { return std::bit_cast<float>(0x7fc00000u); }

ECHELON_HOST_DEVICE inline float fp16_scale_of(double largest) {
  if (!(largest < 0x1p142)) return poison();
  const int exponent = largest > 0 ? std::ilogb(largest) - 14 : -126;
  return std::ldexp(1.0f, exponent > -126 ? exponent : -126);
}

ECHELON_HOST_DEVICE inline float int8_scale_of(double largest) {
  constexpr float most = 3.40282346638528859812e38f, least_normal = 0x1p-126f;
  // True for NaN, and for what f32 cannot represent.
  if (!(largest <= static_cast<double>(most))) return poison();
  const auto exact = static_cast<float>(largest / 127);
  const float scale = exact < least_normal ? least_normal : exact;
  // The product is exact: no element exceeds 127 scales.
  return 127 * static_cast<double>(scale) < largest
             ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) + 1)  // the next larger one
             : scale;
}

// x in units, rounded up or down by the random word.
template <class F>
ECHELON_HOST_DEVICE std::int8_t int8_of(F x, F unit, std::uint32_t random) {
  const F multiple = x / unit;  // -127 .. 127
  std::int32_t below = static_cast<std::int32_t>(multiple);
  below -= static_cast<F>(below) > multiple ? 1 : 0;
  const F fraction = multiple - static_cast<F>(below);
  const F uniform = static_cast<F>(static_cast<std::int32_t>(random >> 8)) * F(0x1p-24);
  return static_cast<std::int8_t>(below + (uniform < fraction ? 1 : 0));
}

// As integers, magnitudes have the same order, with NaN above infinity.
template <class F>
using MagnitudeBits = std::conditional_t<sizeof(F) == 4, std::int32_t, std::int64_t>;
template <class F>
ECHELON_HOST_DEVICE MagnitudeBits<F> magnitude_bits(F x) {
  using Bits = MagnitudeBits<F>;
  return std::bit_cast<Bits>(x) & static_cast<Bits>(~(std::uint64_t{1} << (8 * sizeof(F) - 1)));
}

// Bytes need no alignment.
template <class T>
ECHELON_HOST_DEVICE T load_bytes(const std::byte* in) {
  T value;
  memcpy(&value, in, sizeof(T));
  return value;
}
template <class T>
ECHELON_HOST_DEVICE void store_bytes(T value, std::byte* out) {
  memcpy(out, &value, sizeof(T));
}

template <class F>
struct PackBf16 {
  const F* x;
  std::byte* out;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t i) const {
    store_bytes(finite_bf16(narrow(x[i])), out + 2 * i);
  }
};
template <class F>
struct UnpackBf16 {
  const std::byte* in;
  bool accumulate;
  F* y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t i) const {
    const F value = static_cast<F>(bf16_value(load_bytes<std::uint16_t>(in + 2 * i)));
    y[i] = accumulate ? y[i] + value : value;
  }
};

// A block of a packed gradient, with its own scale.
struct PackedBlock {
  std::int64_t begin, size;        // the largest magnitude here determines the scale
  std::int64_t first, count;       // the elements of it that are packed
  std::int64_t packed;             // the byte offset of its scale, which its elements follow
  std::int64_t section, position;  // of the first element: which generator rounds it, and at which position
};

template <class F>
struct PackBlock {
  CompressionKind kind;  // fp16 or int8
  const F* x;
  const PackedBlock* blocks;
  const PhiloxKey* rounding;  // of each section, for int8
  std::byte* out;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t at) const {
    const PackedBlock block = blocks[at];
    MagnitudeBits<F> most = 0;
    for (std::int64_t i = team.lane(); i < block.size; i += team.lanes())
      most = Larger()(most, magnitude_bits(x[block.begin + i]));
    const auto largest = static_cast<double>(std::bit_cast<F>(largest_of(team, most)));
    const float scale = kind == CompressionKind::fp16 ? fp16_scale_of(largest) : int8_scale_of(largest);
    std::byte* const scaled = out + block.packed + sizeof scale;
    if (team.lane() == 0) store_bytes(scale, out + block.packed);
    const bool holds = std::isfinite(scale);
    const F unit = static_cast<F>(scale), inverse = 1 / unit;
    for (std::int64_t i = team.lane(); i < block.count; i += team.lanes()) {
      const F value = x[block.first + i];
      if (kind == CompressionKind::fp16)
        store_bytes(holds ? half_of(narrow(value * inverse)) : std::uint16_t{0}, scaled + 2 * i);
      else
        store_bytes(holds ? int8_of(value, unit,
                                    philox_word(rounding[block.section],
                                                static_cast<std::uint64_t>(block.position + i)))
                          : std::int8_t{0},
                    scaled + i);
    }
  }
};

// Prevents contraction with a following addition, which a device would do and the host does not.
template <class F>
ECHELON_HOST_DEVICE F product_of(F x, F y) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == 4)
    return __fmul_rn(x, y);
  else
    return __dmul_rn(x, y);
#else
  return x * y;
#endif
}

template <class F>
struct UnpackBlock {
  CompressionKind kind;
  const std::byte* in;
  const PackedBlock* blocks;
  bool accumulate;
  F* y;  // the first element that is packed
  std::int64_t first;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t at) const {
    const PackedBlock block = blocks[at];
    const auto unit = static_cast<F>(load_bytes<float>(in + block.packed));
    const std::byte* const scaled = in + block.packed + sizeof(float);
    for (std::int64_t i = team.lane(); i < block.count; i += team.lanes()) {
      const F number = kind == CompressionKind::fp16
                           ? static_cast<F>(half_value(load_bytes<std::uint16_t>(scaled + 2 * i)))
                           : static_cast<F>(load_bytes<std::int8_t>(scaled + i));
      const F value = product_of(number, unit);
      F& to = y[block.first - first + i];
      to = accumulate ? to + value : value;
    }
  }
};

}  // namespace echelon::rows
