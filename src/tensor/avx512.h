// What the files share whose functions are compiled for AVX-512. A word is two bf16, or an f32.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace echelon {

// Functions without instructions for bf16 run without them, too: the compiler does not use them by itself.
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512bf16")))
#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512bf16"), always_inline))

inline bool has_avx512() {
  static const bool has_it = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return has_it;
}
inline bool has_avx512_bf16() {
  static const bool has_it = has_avx512() && __builtin_cpu_supports("avx512bf16");
  return has_it;
}

// The 16 words of 16 lines, turned: word w of all lines together.
WITH_AVX512 inline void turn_words(const __m512i (&line)[16], __m512i (&word)[16]) {
  constexpr __mmask16 all = 0xffff;  // GCC warns if there is no mask
  constexpr __mmask8 pairs = 0xff;
  __m512i two[16], four[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    two[i] = _mm512_maskz_unpacklo_epi32(all, line[i], line[i + 1]);
    two[i + 1] = _mm512_maskz_unpackhi_epi32(all, line[i], line[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // the lanes of four[i + w] are words w, w + 4, ... of four lines
    four[i] = _mm512_maskz_unpacklo_epi64(pairs, two[i], two[i + 2]);
    four[i + 1] = _mm512_maskz_unpackhi_epi64(pairs, two[i], two[i + 2]);
    four[i + 2] = _mm512_maskz_unpacklo_epi64(pairs, two[i + 1], two[i + 3]);
    four[i + 3] = _mm512_maskz_unpackhi_epi64(pairs, two[i + 1], two[i + 3]);
  }
  constexpr int even = 0x88, odd = 0xdd;  // which lanes of two vectors
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) {
    const __m512i a = _mm512_maskz_shuffle_i32x4(all, four[w], four[4 + w], even),
                  b = _mm512_maskz_shuffle_i32x4(all, four[8 + w], four[12 + w], even),
                  c = _mm512_maskz_shuffle_i32x4(all, four[w], four[4 + w], odd),
                  d = _mm512_maskz_shuffle_i32x4(all, four[8 + w], four[12 + w], odd);
    word[w] = _mm512_maskz_shuffle_i32x4(all, a, b, even);
    word[8 + w] = _mm512_maskz_shuffle_i32x4(all, a, b, odd);
    word[4 + w] = _mm512_maskz_shuffle_i32x4(all, c, d, even);
    word[12 + w] = _mm512_maskz_shuffle_i32x4(all, c, d, odd);
  }
}

WITH_AVX512 inline __mmask32 first_of_32(std::int64_t count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << std::max<std::int64_t>(count, 0)) - 1;
}

// Two rows of 32 bf16 as words of one element of each.
class PairedRows {
 public:
  WITH_AVX512 PairedRows() {
    alignas(64) std::uint16_t places[2][32];
    for (std::uint16_t i = 0; i < 32; ++i) {
      places[0][i] = static_cast<std::uint16_t>(i / 2 + i % 2 * 32);
      places[1][i] = static_cast<std::uint16_t>(places[0][i] + 16);
    }
    first_ = _mm512_load_si512(places[0]), last_ = _mm512_load_si512(places[1]);
  }
  WITH_AVX512 __m512i first_words(__m512i row, __m512i other) const {
    return _mm512_permutex2var_epi16(row, first_, other);
  }
  WITH_AVX512 __m512i last_words(__m512i row, __m512i other) const {
    return _mm512_permutex2var_epi16(row, last_, other);
  }

 private:
  __m512i first_, last_;
};

}  // namespace echelon
#endif
