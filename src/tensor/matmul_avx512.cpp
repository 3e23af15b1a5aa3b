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

__attribute__((target("avx512f,avx512bf16"))) void avx512_tile(std::int64_t words, const std::uint32_t* a,
                                                               const std::uint32_t* b, float* to,
                                                               const TileTarget& target) {
  __m512 sums[avx512_rows][avx512_vectors];
#pragma GCC unroll 14
  for (int i = 0; i < avx512_rows; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  const auto add_word = [&]() __attribute__((target("avx512f,avx512bf16"), always_inline)) {
    const auto b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
    const auto b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 16));
#pragma GCC unroll 14
    for (int i = 0; i < avx512_rows; ++i) {
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[i])));
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, b0);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, b1);
    }
    a += avx512_rows;
    b += 16 * avx512_vectors;
  };
  const std::int64_t fetching = target.data == nullptr ? 0 : std::min<std::int64_t>(avx512_rows, words);
  for (std::int64_t w = fetching; w < words; ++w) add_word();
  for (std::int64_t row = 0; row < fetching; ++row) {
    target.fetch(row);
    add_word();
  }
#pragma GCC unroll 14
  for (int i = 0; i < avx512_rows; ++i) {
    _mm512_storeu_ps(to + i * 32, sums[i][0]);
    _mm512_storeu_ps(to + i * 32 + 16, sums[i][1]);
  }
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
