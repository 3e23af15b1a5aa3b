#include "tensor/codecs.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tensor/rows/codecs.h"

namespace echelon {
namespace {

template <class F, class Value>
void put(std::int64_t n, bool accumulate, F* y, const Value& value) {
  if (accumulate)
    for (std::int64_t i = 0; i < n; ++i) y[i] += value(i);
  else
    for (std::int64_t i = 0; i < n; ++i) y[i] = value(i);
}

}  // namespace

template <class F>
void encode_bf16(const F* x, std::int64_t n, std::byte* out) {
  for (std::int64_t i = 0; i < n; ++i) rows::store_bytes(rows::finite_bf16(rows::narrow(x[i])), out + 2 * i);
}

template <class F>
void decode_bf16(const std::byte* in, std::int64_t n, bool accumulate, F* y) {
  put(n, accumulate, y, [&](std::int64_t i) {
    return static_cast<F>(rows::bf16_value(rows::load_bytes<std::uint16_t>(in + 2 * i)));
  });
}

template <class F>
F largest_magnitude(const F* x, std::int64_t n) {
  rows::MagnitudeBits<F> largest = 0;
  for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, rows::magnitude_bits(x[i]));
  return std::bit_cast<F>(largest);
}

float fp16_scale(double largest) { return rows::fp16_scale_of(largest); }

template <class F>
void encode_fp16(const F* x, std::int64_t n, float scale, std::byte* out) {
  if (!std::isfinite(scale)) return std::fill_n(out, 2 * n, std::byte{0}), void();
  const F inverse = 1 / static_cast<F>(scale);
  for (std::int64_t i = 0; i < n; ++i)
    rows::store_bytes(rows::half_of(rows::narrow(x[i] * inverse)), out + 2 * i);
}

template <class F>
void decode_fp16(const std::byte* in, std::int64_t n, float scale, bool accumulate, F* y) {
  put(n, accumulate, y, [&](std::int64_t i) {
    return static_cast<F>(rows::half_value(rows::load_bytes<std::uint16_t>(in + 2 * i))) *
           static_cast<F>(scale);
  });
}

float int8_scale(double largest) { return rows::int8_scale_of(largest); }

template <class F>
void encode_int8(const F* x, std::int64_t n, float scale, const std::uint32_t* random, std::byte* out) {
  if (!std::isfinite(scale)) return std::fill_n(out, n, std::byte{0}), void();
  const F unit = static_cast<F>(scale);
  for (std::int64_t i = 0; i < n; ++i) rows::store_bytes(rows::int8_of(x[i], unit, random[i]), out + i);
}

template <class F>
void decode_int8(const std::byte* in, std::int64_t n, float scale, bool accumulate, F* y) {
  put(n, accumulate, y, [&](std::int64_t i) {
    return static_cast<F>(rows::load_bytes<std::int8_t>(in + i)) * static_cast<F>(scale);
  });
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
