#include "tensor/codecs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/bf16.h"

namespace echelon {
namespace {

constexpr std::uint32_t magnitude_mask = 0x7fffffffu, infinity_bits = 0x7f800000u;

inline float narrow(float x) { return x; }
inline float narrow(double x) { return rounded_to_odd(x); }

inline std::uint16_t bf16_of(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & magnitude_mask;
  const std::uint32_t rounded = (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16;
  const std::uint32_t finite = std::min(rounded, 0x7f7fu);
  // Bit 6 keeps a NaN whose payload lies in the lower half from becoming infinity.
  const std::uint32_t other = magnitude >> 16 | (magnitude > infinity_bits ? 0x40u : 0u);
  return static_cast<std::uint16_t>((magnitude < infinity_bits ? finite : other) | (bits >> 16 & 0x8000u));
}

// |x| < 2^16.
inline std::uint16_t half_of(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), magnitude = bits & magnitude_mask;
  const std::uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  // Beside 0.5 the last bit of an f32 is 2^-24, as of a half below 2^-14: the addition rounds.
  const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                              std::bit_cast<std::uint32_t>(0.5f);
  return static_cast<std::uint16_t>((magnitude < (113u << 23) ? small : normal) | (bits >> 16 & 0x8000u));
}

inline float half_value(std::uint16_t half) {
  const std::uint32_t magnitude = (half & 0x7fffu) << 13;
  const float value = std::bit_cast<float>(magnitude) * 0x1p112f;  // exact, below 2^-14 too
  return (half & 0x8000u) != 0 ? -value : value;
}

template <class T>
inline T load(const std::byte* in, std::int64_t i) {
  T value;
  std::memcpy(&value, in + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
inline void store(T value, std::byte* out, std::int64_t i) {
  std::memcpy(out + i * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}

template <class F, class Value>
void put(std::int64_t n, bool accumulate, F* y, const Value& value) {
  if (accumulate)
    for (std::int64_t i = 0; i < n; ++i) y[i] += value(i);
  else
    for (std::int64_t i = 0; i < n; ++i) y[i] = value(i);
}

constexpr float poison = std::numeric_limits<float>::quiet_NaN();

}  // namespace

template <class F>
void encode_bf16(const F* x, std::int64_t n, std::byte* out) {
  for (std::int64_t i = 0; i < n; ++i) store(bf16_of(narrow(x[i])), out, i);
}

template <class F>
void decode_bf16(const std::byte* in, std::int64_t n, bool accumulate, F* y) {
  put(n, accumulate, y, [&](std::int64_t i) {
    return static_cast<F>(std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(in, i)) << 16));
  });
}

template <class F>
F largest_magnitude(const F* x, std::int64_t n) {
  // As whole numbers the magnitudes have the same order, and NaN is above infinity.
  using Bits = std::conditional_t<sizeof(F) == 4, std::int32_t, std::int64_t>;
  Bits largest = 0;
  for (std::int64_t i = 0; i < n; ++i)
    largest = std::max(largest, std::bit_cast<Bits>(x[i]) & std::numeric_limits<Bits>::max());
  return std::bit_cast<F>(largest);
}

float fp16_scale(double largest) {
  if (!(largest < 0x1p142)) return poison;
  const int exponent = largest > 0 ? std::ilogb(largest) - 14 : -126;
  return std::ldexp(1.0f, std::max(exponent, -126));
}

template <class F>
void encode_fp16(const F* x, std::int64_t n, float scale, std::byte* out) {
  if (!std::isfinite(scale)) return std::fill_n(out, 2 * n, std::byte{0}), void();
  const F inverse = 1 / static_cast<F>(scale);
  for (std::int64_t i = 0; i < n; ++i) store(half_of(narrow(x[i] * inverse)), out, i);
}

template <class F>
void decode_fp16(const std::byte* in, std::int64_t n, float scale, bool accumulate, F* y) {
  put(n, accumulate, y, [&](std::int64_t i) {
    return static_cast<F>(half_value(load<std::uint16_t>(in, i))) * static_cast<F>(scale);
  });
}

float int8_scale(double largest) {
  // A NaN, and what f32 cannot hold.
  if (!(largest <= static_cast<double>(std::numeric_limits<float>::max()))) return poison;
  float scale = std::max(static_cast<float>(largest / 127), std::numeric_limits<float>::min());
  // The product is exact: no element is more than 127 scales.
  if (127 * static_cast<double>(scale) < largest)
    scale = std::nextafter(scale, std::numeric_limits<float>::infinity());
  return scale;
}

template <class F>
void encode_int8(const F* x, std::int64_t n, float scale, const std::uint32_t* random, std::byte* out) {
  if (!std::isfinite(scale)) return std::fill_n(out, n, std::byte{0}), void();
  const F unit = static_cast<F>(scale);
  for (std::int64_t i = 0; i < n; ++i) {
    const F multiple = x[i] / unit;  // -127 .. 127
    std::int32_t below = static_cast<std::int32_t>(multiple);
    below -= static_cast<F>(below) > multiple ? 1 : 0;
    const F fraction = multiple - static_cast<F>(below);
    const F uniform = static_cast<F>(static_cast<std::int32_t>(random[i] >> 8)) * F(0x1p-24);
    store(static_cast<std::int8_t>(below + (uniform < fraction ? 1 : 0)), out, i);
  }
}

template <class F>
void decode_int8(const std::byte* in, std::int64_t n, float scale, bool accumulate, F* y) {
  put(n, accumulate, y,
      [&](std::int64_t i) { return static_cast<F>(load<std::int8_t>(in, i)) * static_cast<F>(scale); });
}

template void encode_bf16(const float*, std::int64_t, std::byte*);
template void decode_bf16(const std::byte*, std::int64_t, bool, float*);
template float largest_magnitude(const float*, std::int64_t);
template void encode_fp16(const float*, std::int64_t, float, std::byte*);
template void decode_fp16(const std::byte*, std::int64_t, float, bool, float*);
template void encode_int8(const float*, std::int64_t, float, const std::uint32_t*, std::byte*);
template void decode_int8(const std::byte*, std::int64_t, float, bool, float*);

template void encode_bf16(const double*, std::int64_t, std::byte*);
template void decode_bf16(const std::byte*, std::int64_t, bool, double*);
template double largest_magnitude(const double*, std::int64_t);
template void encode_fp16(const double*, std::int64_t, float, std::byte*);
template void decode_fp16(const std::byte*, std::int64_t, float, bool, double*);
template void encode_int8(const double*, std::int64_t, float, const std::uint32_t*, std::byte*);
template void decode_int8(const std::byte*, std::int64_t, float, bool, double*);

}  // namespace echelon
