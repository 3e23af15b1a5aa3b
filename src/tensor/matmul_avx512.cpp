// Products of bf16 by AVX-512 (VDPBF16PS).
#include <algorithm>

#include "tensor/matmul_simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace echelon {

#if defined(__x86_64__)
namespace {

constexpr int avx512_rows = 14,
              avx512_vectors = 2;  // 28 sums, two vectors of b and one of a: 31 registers of 32

#define WITH_AVX512 __attribute__((target("avx512f,avx512bf16"), always_inline))

// Rounds to nearest, ties to even, like tiles at the edge of c (simd_bf16-inl.h). VCVTNEPS2BF16 would flush
// subnormal numbers to 0.
WITH_AVX512 inline void store_bf16(__m512 v, void* to) {
  const __m512i whole = _mm512_castps_si512(v), half = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1),
                quiet = _mm512_set1_epi32(0x400000);
  constexpr __mmask16 all = 0xffff;
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(all, whole, 16), one);
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(whole, half), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_or_epi32(nearest, is_nan, whole, quiet);
  _mm256_storeu_si256(static_cast<__m256i*>(to),
                      _mm512_maskz_cvtepi32_epi16(all, _mm512_maskz_srli_epi32(all, rounded, 16)));
}

__attribute__((target("avx512f,avx512bf16"))) bool avx512_tile(const Tile& made) {
  __m512 sums[avx512_rows][avx512_vectors];
#pragma GCC unroll 14
  for (int i = 0; i < avx512_rows; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  const std::uint32_t *a = made.a, *b = made.b;
  FetchBeside fetches(made, avx512_rows);
  for (std::int64_t w = 0; w < made.words; ++w, a += avx512_rows, b += 16 * avx512_vectors) {
    fetches.before(w);
    const auto b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
    const auto b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 16));
#pragma GCC unroll 14
    for (int i = 0; i < avx512_rows; ++i) {
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[i])));
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, b0);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, b1);
    }
  }
  const auto each_row = [&](std::byte * to, std::int64_t stride, const auto& store)
      __attribute__((target("avx512f,avx512bf16"), always_inline)) {
#pragma GCC unroll 14
    for (int i = 0; i < avx512_rows; ++i) store(to + i * stride, sums[i][0], sums[i][1]);
  };
  const auto floats = [](std::byte* to, __m512 v0, __m512 v1) WITH_AVX512 {
    _mm512_storeu_ps(to, v0);
    _mm512_storeu_ps(to + 64, v1);
  };
  const TileTarget* const target = made.target;
  if (target == nullptr || !target->is_plain(avx512_rows, 16 * avx512_vectors)) {
    each_row(reinterpret_cast<std::byte*>(made.sums), 4 * 16 * avx512_vectors, floats);
    return false;
  }
  if (target->narrow)
    each_row(target->data, target->stride, [](std::byte* to, __m512 v0, __m512 v1) WITH_AVX512 {
      store_bf16(v0, to);
      store_bf16(v1, to + 32);
    });
  else if (target->beta == 0)
    each_row(target->data, target->stride, floats);
  else
    each_row(target->data, target->stride, [](std::byte* to, __m512 v0, __m512 v1) WITH_AVX512 {
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), v0));
      _mm512_storeu_ps(to + 64, _mm512_add_ps(_mm512_loadu_ps(to + 64), v1));
    });
  return true;
}

constexpr MicroKernel avx512_kernel{.name = "AVX-512 in bf16",
                                    .rows = avx512_rows,
                                    .cols = 16 * avx512_vectors,
                                    .pairs = true,
                                    .whole_depth = 2048,
                                    .a_words = 112 * 1024,
                                    .tile = avx512_tile};

}  // namespace

const MicroKernel* avx512_micro_kernel() {
  static const bool has_it = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
  return has_it ? &avx512_kernel : nullptr;
}
#else
const MicroKernel* avx512_micro_kernel() { return nullptr; }
#endif

}  // namespace echelon
