// Narrow formats of floating-point numbers, packed into bytes, for gradients in transit. Plain loops over n
// elements (F is float or double); bytes need no alignment. All sums stay in F.
//
// A value that a format cannot hold never becomes a wrong finite number: NaN, infinity, and f64 beyond the
// range of f32 (for fp16: of 2^142) decode to something that is not finite, so that a bad gradient is still
// noticed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace echelon {

// bfloat16: 2 n bytes, rounded to nearest even. |error| <= 2^-8 |x| (8 significant bits), or 2^-134 if x is
// below the smallest normal f32. f32 above the largest bfloat16 becomes that one, within the same bound.
template <class F>
void encode_bf16(const F* x, std::int64_t n, std::byte* out);
template <class F>
void decode_bf16(const std::byte* in, std::int64_t n, bool accumulate, F* y);  // y = or y +=

// max |x|; NaN if any element is NaN.
template <class F>
F largest_magnitude(const F* x, std::int64_t n);

// IEEE half with a power-of-two scale for each block, which brings the block's largest magnitude m into
// [2^14, 2^15): nothing overflows and no loss scale is needed. |error| <= max(2^-11 |x|, 2^-39 m), or 2^-149
// at the lower end of f32.
float fp16_scale(double largest);
template <class F>
void encode_fp16(const F* x, std::int64_t n, float scale, std::byte* out);  // 2 n bytes
template <class F>
void decode_fp16(const std::byte* in, std::int64_t n, float scale, bool accumulate, F* y);

// Multiples of m / 127 for a block whose largest magnitude is m, with stochastic rounding (random: n words),
// so that the expected value is x (Gupta et al. 2015, https://arxiv.org/abs/1502.02551). |error| <= scale,
// |bias| <= 2^-16 scale.
float int8_scale(double largest);
template <class F>
void encode_int8(const F* x, std::int64_t n, float scale, const std::uint32_t* random, std::byte* out);
template <class F>
void decode_int8(const std::byte* in, std::int64_t n, float scale, bool accumulate, F* y);

}  // namespace echelon
