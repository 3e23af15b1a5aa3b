// Products of bf16 by AVX-512 (VDPBF16PS); and of f32, for attention.
#include <algorithm>

#include "tensor/avx512.h"
#include "tensor/matmul_simd.h"

namespace echelon {

#if defined(__x86_64__)
namespace {

constexpr int avx512_rows = 14,
              avx512_vectors = 2;  // 28 sums, two vectors of b and one of a: 31 registers of 32

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

FOR_AVX512 bool avx512_tile(const Tile& made) {
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
  const auto each_row = [&](std::byte* to, std::int64_t stride, const auto& store) WITH_AVX512 {
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

// Columns are lines of b, 32 of them at once.
template <int rows>
FOR_AVX512 void avx512_thin_along(const ThinProduct& p) {
  constexpr std::int64_t lines = 16, blocks = 2, elements = 32, ahead = 16 * elements;
  for (std::int64_t j = 0; j < p.cols; j += blocks * lines) {
    __m512 sums[blocks][rows];
    for (int v = 0; v < blocks; ++v)
      for (int i = 0; i < rows; ++i) sums[v][i] = _mm512_setzero_ps();
    const auto load = [&](int v, std::int64_t k, __mmask32 mask, __m512i(&word)[16]) WITH_AVX512 {
      // Behind the end of these lines begin those after them.
      const std::int64_t further = k + ahead < p.k ? ahead : ahead - p.k + blocks * lines * p.stride;
      __m512i line[16];
#pragma GCC unroll 16
      for (int i = 0; i < lines; ++i) {
        const bf16* const from = p.b + std::min(j + v * lines + i, p.cols - 1) * p.stride + k;
        __builtin_prefetch(from + further);
        line[i] = _mm512_maskz_loadu_epi16(mask, from);
      }
      turn_words(line, word);
    };
    const auto add = [&](int v, const std::uint32_t* a, __m512i word) WITH_AVX512 {
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i)
        sums[v][i] = _mm512_dpbf16_ps(sums[v][i],
                                      reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[i]))),
                                      reinterpret_cast<__m512bh>(word));
    };
    const std::uint32_t* a = p.a;
    std::int64_t k = 0;
    for (; k + elements <= p.k; k += elements, a += 16 * avx512_rows)
#pragma GCC unroll 2
      for (int v = 0; v < blocks; ++v) {
        __m512i word[16];
        load(v, k, ~__mmask32{0}, word);
#pragma GCC unroll 16
        for (int w = 0; w < 16; ++w) add(v, a + w * avx512_rows, word[w]);
      }
    if (k < p.k)
      for (int v = 0; v < blocks; ++v) {
        __m512i word[16];
        load(v, k, first_of_32(p.k - k), word);
        for (int w = 0; 2 * w < p.k - k; ++w) add(v, a + w * avx512_rows, word[w]);
      }
    for (int v = 0; v < blocks && j + v * lines < p.cols; ++v)
      for (int i = 0; i < rows; ++i)
        _mm512_storeu_ps(p.sums + i * MicroKernel::thin_cols + j + v * lines, sums[v][i]);
  }
}

// Columns lie side by side, `pairs` times 32 of them at once.
template <int rows, int pairs>
FOR_AVX512 void avx512_thin_across(const ThinProduct& p) {
  constexpr std::int64_t width = 32, ahead = 16;
  const PairedRows paired;
  for (std::int64_t j = 0; j < p.cols; j += pairs * width) {
    __m512 sums[rows][2 * pairs];
    __mmask32 mask[pairs];
    for (int v = 0; v < pairs; ++v) mask[v] = first_of_32(p.cols - j - v * width);
    for (int i = 0; i < rows; ++i)
      for (int v = 0; v < 2 * pairs; ++v) sums[i][v] = _mm512_setzero_ps();
    const std::uint32_t* a = p.a;
    for (std::int64_t k = 0; k < p.k; k += 2, a += avx512_rows) {
      const bf16* const row = p.b + k * p.stride + j;
      const bool alone = k + 1 == p.k;
#pragma GCC unroll 8
      for (int v = 0; v < pairs; ++v) {
        __builtin_prefetch(row + ahead * p.stride + v * width);
        __builtin_prefetch(row + (ahead + 1) * p.stride + v * width);
        const __m512i one = _mm512_maskz_loadu_epi16(mask[v], row + v * width),
                      other = _mm512_maskz_loadu_epi16(alone ? 0 : mask[v], row + p.stride + v * width);
        const auto b0 = reinterpret_cast<__m512bh>(paired.first_words(one, other)),
                   b1 = reinterpret_cast<__m512bh>(paired.last_words(one, other));
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) {
          const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[i])));
          sums[i][2 * v] = _mm512_dpbf16_ps(sums[i][2 * v], x, b0);
          sums[i][2 * v + 1] = _mm512_dpbf16_ps(sums[i][2 * v + 1], x, b1);
        }
      }
    }
    for (int i = 0; i < rows; ++i)
      for (int v = 0; v < 2 * pairs && j + v * 16 < p.cols; ++v)
        _mm512_storeu_ps(p.sums + i * MicroKernel::thin_cols + j + v * 16, sums[i][v]);
  }
}

void avx512_thin(const ThinProduct& p) {
  static_assert(MicroKernel::thin_rows == 4);
  if (p.along) return p.rows == 1 ? avx512_thin_along<1>(p) : avx512_thin_along<4>(p);
  return p.rows == 1 ? avx512_thin_across<1, 8>(p) : avx512_thin_across<4, 3>(p);
}

constexpr MicroKernel avx512_kernel{.name = "AVX-512 in bf16",
                                    .rows = avx512_rows,
                                    .cols = 16 * avx512_vectors,
                                    .pairs = true,
                                    .whole_depth = 2048,
                                    .a_words = 112 * 1024,
                                    .tile = avx512_tile,
                                    .thin = avx512_thin};

// Columns of tiles in the layout of AMX (tensor/matmul_amx.h): for attention, whose tiles are then packed for
// the next product as they are computed.
constexpr int column_rows = 32, column_vectors = 2, column_group = 16;
constexpr std::int64_t column_cols = 16 * column_vectors, column_tile = column_rows * column_cols;

// How the products of words are added.
struct OfPairs {
  WITH_AVX512 static __m512 add(__m512 sum, __m512i x, __m512i y) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
  }
};
struct OfFloats {
  WITH_AVX512 static __m512 add(__m512 sum, __m512i x, __m512i y) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), sum);
  }
};

// Rows [first, first + rows) of a tile.
template <class Of, int first, int rows>
FOR_AVX512 void avx512_rows_of_tile(std::int64_t words, const std::uint32_t* a, const GroupedRows& a_rows,
                                    const std::uint32_t* b, const float* before, float* to) {
  const std::int64_t a_row = a_rows.row_bytes / 4;
  __m512 sums[rows][column_vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < column_vectors; ++v)
      sums[i][v] = before == nullptr ? _mm512_setzero_ps()
                                     : _mm512_loadu_ps(before + (first + i) * column_cols + 16 * v);
  a += first * a_row;
  for (std::int64_t w = 0; w < words; w += column_group, a += a_rows.group_words)
    for (int g = 0; g < column_group; ++g, b += column_cols) {
      const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 16);
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) {
        const __m512i x = _mm512_set1_epi32(static_cast<int>(a[i * a_row + g]));
        sums[i][0] = Of::add(sums[i][0], x, b0);
        sums[i][1] = Of::add(sums[i][1], x, b1);
      }
    }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < column_vectors; ++v)
      _mm512_storeu_ps(to + (first + i) * column_cols + 16 * v, sums[i][v]);
}

template <class Of>
void avx512_column(const TileColumn& column) {
  for (std::int64_t t = 0; t < column.tiles; ++t) {
    const std::uint32_t* const a = column.a + t * column.a_tile;
    const float* const before = column.before == nullptr ? nullptr : column.before + t * column_tile;
    float* const sums = column.sums + (column.target == nullptr ? t * column_tile : 0);
    // A third of them at once: 22 sums, two vectors of b and one of a.
    avx512_rows_of_tile<Of, 0, 11>(column.words, a, column.a_rows, column.b, before, sums);
    avx512_rows_of_tile<Of, 11, 11>(column.words, a, column.a_rows, column.b, before, sums);
    avx512_rows_of_tile<Of, 22, 10>(column.words, a, column.a_rows, column.b, before, sums);
    if (column.target == nullptr) continue;
    TileTarget target = *column.target;
    target.data += t * column_rows * target.stride;
    target.rows = std::min<std::int64_t>(column_rows, target.rows - t * column_rows);
    matmul_passes().store(sums, column_cols, 0, target.rows, target);
  }
}

template <class Of>
constexpr MicroKernel columns_of(const char* name, bool pairs) {
  return {.name = name,
          .rows = column_rows,
          .cols = column_cols,
          .pairs = pairs,
          .group = column_group,
          .column = avx512_column<Of>};
}
constexpr MicroKernel bf16_columns = columns_of<OfPairs>("columns of AVX-512 in bf16", true),
                      f32_columns = columns_of<OfFloats>("columns of AVX-512 in f32", false);

}  // namespace

const MicroKernel* avx512_micro_kernel() { return has_avx512_bf16() ? &avx512_kernel : nullptr; }
const MicroKernel* avx512_column_kernel() { return has_avx512_bf16() ? &bf16_columns : nullptr; }
const MicroKernel* f32_column_kernel() { return has_avx512() ? &f32_columns : nullptr; }
#else
const MicroKernel* avx512_micro_kernel() { return nullptr; }
const MicroKernel* avx512_column_kernel() { return nullptr; }
const MicroKernel* f32_column_kernel() { return nullptr; }
#endif

}  // namespace echelon
