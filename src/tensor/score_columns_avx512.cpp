#include <limits>

#include "tensor/avx512.h"
#include "tensor/score_columns.h"
#include "tensor/three_parts_avx512.h"

namespace echelon {

#if defined(__x86_64__)
namespace {

constexpr std::int64_t width = ScoreColumns::queries, lanes = 16, tile_rows = 32;
constexpr float log2e = 1.44269504f;
constexpr __mmask16 whole = 0xffff;  // GCC warns if there is no mask

// 32 columns of a row.
struct Row {
  __m512 low, high;
};
WITH_AVX512 inline Row load_row(const float* x) { return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + lanes)}; }
WITH_AVX512 inline void store_row(Row v, float* to) {
  _mm512_storeu_ps(to, v.low);
  _mm512_storeu_ps(to + lanes, v.high);
}
WITH_AVX512 inline Row both(float x) { return {_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
WITH_AVX512 inline __m512 larger(__m512 x, __m512 y) { return _mm512_maskz_max_ps(whole, x, y); }
// y, if one of them is NaN.
WITH_AVX512 inline __m512 smaller(__m512 x, __m512 y) { return _mm512_maskz_min_ps(whole, x, y); }
WITH_AVX512 inline Row larger(Row x, Row y) { return {larger(x.low, y.low), larger(x.high, y.high)}; }
WITH_AVX512 inline Row operator+(Row x, Row y) {
  return {_mm512_add_ps(x.low, y.low), _mm512_add_ps(x.high, y.high)};
}
WITH_AVX512 inline Row operator-(Row x, Row y) {
  return {_mm512_sub_ps(x.low, y.low), _mm512_sub_ps(x.high, y.high)};
}
WITH_AVX512 inline Row operator*(Row x, Row y) {
  return {_mm512_mul_ps(x.low, y.low), _mm512_mul_ps(x.high, y.high)};
}
WITH_AVX512 inline __m512 widened(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(whole, _mm512_maskz_cvtepu16_epi32(whole, halves), 16));
}

// How words are made from elements.
struct Orders {
  WITH_AVX512 Orders() {}

  PairedRows paired;
  NeighbourWords neighbours;
};

// Two rows as words of attention in T, and a row of a tile of a left operand. Rounding to bf16 makes
// subnormal numbers 0.
template <class T>
struct Words;
template <>
struct Words<bf16> {
  __m512i all;

  WITH_AVX512 static Words of(Row x) {
    return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x.high, x.low))};
  }
  WITH_AVX512 static void store_two(const Orders& orders, const Words& x, const Words& y, std::uint32_t* to) {
    _mm512_storeu_si512(to, orders.paired.first_words(x.all, y.all));
    _mm512_storeu_si512(to + lanes, orders.paired.last_words(x.all, y.all));
  }
  WITH_AVX512 void store_left(const Orders&, std::int64_t row, std::uint32_t* panel_of_keys) const {
    _mm512_storeu_si512(panel_of_keys + row * lanes, all);
  }
  WITH_AVX512 static Row load(const bf16* x, std::int64_t cols) {
    const __m512i words = _mm512_maskz_loadu_epi16(first_of_32(cols), x);
    return {widened(_mm512_maskz_extracti64x4_epi64(0xf, words, 0)),
            widened(_mm512_maskz_extracti64x4_epi64(0xf, words, 1))};
  }
  WITH_AVX512 void store(bf16* to, std::int64_t cols) const {
    _mm512_mask_storeu_epi16(to, first_of_32(cols), all);
  }
};
template <>
struct Words<float> {
  Row all;

  WITH_AVX512 static Words of(Row x) { return {x}; }
  WITH_AVX512 static void store_two(const Orders&, const Words& x, const Words& y, std::uint32_t* to) {
    store_row(x.all, reinterpret_cast<float*>(to));
    store_row(y.all, reinterpret_cast<float*>(to + width));
  }
  WITH_AVX512 void store_left(const Orders&, std::int64_t row, std::uint32_t* panel_of_keys) const {
    _mm512_storeu_ps(panel_of_keys + row * lanes, all.low);
    _mm512_storeu_ps(panel_of_keys + (tile_rows + row) * lanes, all.high);
  }
  WITH_AVX512 static Row load(const float* x, std::int64_t cols) {
    const __mmask32 mask = first_of_32(cols);
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x),
            _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> lanes), x + lanes)};
  }
  WITH_AVX512 void store(float* to, std::int64_t cols) const {
    const __mmask32 mask = first_of_32(cols);
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>(mask), all.low);
    _mm512_mask_storeu_ps(to + lanes, static_cast<__mmask16>(mask >> lanes), all.high);
  }
};
template <>
struct Words<ThreeParts> {
  static constexpr std::int64_t part_words = tile_rows * lanes;
  PartVectors low, high;

  WITH_AVX512 static Words of(Row x) { return {parts_of(x.low), parts_of(x.high)}; }
  WITH_AVX512 static void store_two(const Orders&, const Words& x, const Words& y, std::uint32_t* to) {
    const PartVectors first = words_of_parts(x.low, y.low), last = words_of_parts(x.high, y.high);
#pragma GCC unroll 3
    for (int part = 0; part < parts_of_f32; ++part) {
      _mm512_storeu_si512(to + part * part_words, first.of[part]);
      _mm512_storeu_si512(to + part * part_words + lanes, last.of[part]);
    }
  }
  WITH_AVX512 void store_left(const Orders& orders, std::int64_t row, std::uint32_t* panel_of_keys) const {
    const PartVectors words = orders.neighbours.words(low, high);
#pragma GCC unroll 3
    for (int part = 0; part < parts_of_f32; ++part)
      _mm512_storeu_si512(panel_of_keys + part * part_words + row * lanes, words.of[part]);
  }
};

// Where the words of two rows begin, in panels of a right operand.
template <class T>
WITH_AVX512 inline std::int64_t words_before(std::int64_t row) {
  constexpr std::int64_t per_word = std::is_same_v<T, float> ? 1 : 2,
                         parts = std::is_same_v<T, ThreeParts> ? parts_of_f32 : 1;
  return row / tile_rows * (tile_rows * width / per_word * parts) + row % tile_rows * width / per_word;
}

// 2^x, for the fraction of x by the polynomial of least relative error (2e-9) that is 1 at 0; 0 for an x so
// low that the result would be subnormal.
WITH_AVX512 inline __m512 power_of_2(__m512 x) {
  constexpr int floor_taken_off = 1;
  const __m512 f = _mm512_maskz_reduce_ps(whole, x, floor_taken_off);
  __m512 y = _mm512_set1_ps(2.16129207e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.24678446e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.67545155e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.54852821e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40229309e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93147063e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(whole, y, x);
}
WITH_AVX512 inline Row power_of_2(Row x) { return {power_of_2(x.low), power_of_2(x.high)}; }

// Which queries see a row.
struct SeenBy {
  __mmask16 low, high;
};
WITH_AVX512 inline __mmask16 seen_by_half(const ScoreColumns& c, std::int64_t row, std::int64_t q) {
  const __m512i at = _mm512_set1_epi32(static_cast<int>(row));
  return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(_mm512_loadu_si512(c.first + q), at),
                                      _mm512_loadu_si512(c.end + q), at);
}
WITH_AVX512 inline SeenBy seen_by(const ScoreColumns& c, std::int64_t row) {
  return {seen_by_half(c, row, 0), seen_by_half(c, row, lanes)};
}
WITH_AVX512 inline Row if_seen(SeenBy seen, Row x, Row otherwise) {
  return {_mm512_mask_mov_ps(otherwise.low, seen.low, x.low),
          _mm512_mask_mov_ps(otherwise.high, seen.high, x.high)};
}

FOR_AVX512 void lower(float* scores, std::int64_t rows, const float* first, float step, float slope) {
  const Row by = both(slope), down = both(step);
  Row distance = load_row(first);
  for (std::int64_t row = 0; row < rows; ++row, scores += width) {
    store_row(load_row(scores) - distance * by, scores);
    distance = distance - down;
  }
}

template <class T>
FOR_AVX512 void softmax(const ScoreColumns& c, float* max, float* sum, float* factor, std::uint32_t* p) {
  const Orders orders;
  const Row before = load_row(max), unseen = both(-std::numeric_limits<float>::infinity());
  Row most[2] = {before, before};
  for (std::int64_t row = 0; row < c.rows; row += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Row x = load_row(c.scores + (row + i) * width);
      most[i] = larger(most[i], c.all_see(row) ? x : if_seen(seen_by(c, row + i), x, unseen));
    }
  // The largest weight is exactly 1, however large scores are.
  const Row top = larger(most[0], most[1]), scale2 = both(c.scale * log2e);
  Row total[2] = {both(0), both(0)};
  for (std::int64_t row = 0; row < c.rows; row += 2) {
    Words<T> made[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Row e = power_of_2((load_row(c.scores + (row + i) * width) - top) * scale2);
      if (!c.all_see(row)) e = if_seen(seen_by(c, row + i), e, both(0));
      total[i] = total[i] + e;
      made[i] = Words<T>::of(e);
    }
    Words<T>::store_two(orders, made[0], made[1], p + words_before<T>(row));
  }
  // For queries that see no key yet the maxima are infinite, and their difference is NaN.
  Row corrected = power_of_2((before - top) * scale2);
  corrected.low = _mm512_mask_mov_ps(corrected.low, _mm512_cmp_ps_mask(before.low, top.low, _CMP_EQ_OQ),
                                     _mm512_set1_ps(1));
  corrected.high = _mm512_mask_mov_ps(corrected.high, _mm512_cmp_ps_mask(before.high, top.high, _CMP_EQ_OQ),
                                      _mm512_set1_ps(1));
  store_row(load_row(sum) * corrected + (total[0] + total[1]), sum);
  store_row(corrected, factor);
  store_row(top, max);
}

template <class T>
FOR_AVX512 void softmax_gradient(const ScoreColumns& c, const float* dp, const float* lse, const float* delta,
                                 std::uint32_t* p, std::uint32_t* ds, std::int64_t tile_step,
                                 std::uint32_t* ds_words) {
  const Orders orders;
  const Row level = load_row(lse) * both(log2e), means = load_row(delta);
  const __m512 scale2 = _mm512_set1_ps(c.scale * log2e), zero = _mm512_setzero_ps();
  for (std::int64_t row = 0; row < c.rows; row += 2) {
    const std::int64_t panel_of_keys = row / tile_rows * tile_step;
    Words<T> made[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const std::int64_t at = (row + i) * width;
      const Row x = load_row(c.scores + at);
      // No weight is above 1, however large the rounding of large scores is; a NaN stays.
      Row e = power_of_2({smaller(zero, _mm512_fmsub_ps(x.low, scale2, level.low)),
                          smaller(zero, _mm512_fmsub_ps(x.high, scale2, level.high))});
      Row g = e * (load_row(dp + at) - means);
      if (!c.all_see(row)) {
        const SeenBy by = seen_by(c, row + i);
        e = if_seen(by, e, both(0)), g = if_seen(by, g, both(0));
      }
      made[i] = Words<T>::of(g);
      Words<T>::of(e).store_left(orders, row % tile_rows + i, p + panel_of_keys);
      made[i].store_left(orders, row % tile_rows + i, ds + panel_of_keys);
    }
    Words<T>::store_two(orders, made[0], made[1], ds_words + words_before<T>(row));
  }
}

FOR_AVX512 void scale(float* x, std::int64_t rows, const float* factor) {
  const Row by = load_row(factor);
  for (std::int64_t row = 0; row < rows; ++row, x += width) store_row(load_row(x) * by, x);
}

// Transposes 32 rows of x, of which the first `depth` are stored.
FOR_AVX512 void store_turned_tile(const float* x, Row by, std::int64_t depth, std::int64_t queries, bf16* to,
                                  std::int64_t stride) {
  const PairedRows paired;
  __m512i line[2][lanes], word[lanes];
#pragma GCC unroll 16
  for (std::int64_t i = 0; i < lanes; ++i) {
    const __m512i even = Words<bf16>::of(load_row(x + 2 * i * width) * by).all,
                  odd = Words<bf16>::of(load_row(x + (2 * i + 1) * width) * by).all;
    line[0][i] = paired.first_words(even, odd), line[1][i] = paired.last_words(even, odd);
  }
  for (std::int64_t half = 0; half < 2; ++half) {
    turn_words(line[half], word);
    for (std::int64_t i = 0; i < lanes && half * lanes + i < queries; ++i)
      Words<bf16>{word[i]}.store(to + (half * lanes + i) * stride, depth);
  }
}
FOR_AVX512 void store_turned_tile(const float* x, Row by, std::int64_t depth, std::int64_t queries, float* to,
                                  std::int64_t stride) {
  for (std::int64_t half = 0; half < 2; ++half) {
    __m512i line[2][lanes], word[2][lanes];
    for (std::int64_t part = 0; part < 2; ++part) {
#pragma GCC unroll 16
      for (std::int64_t i = 0; i < lanes; ++i) {
        const Row row = load_row(x + (part * lanes + i) * width) * by;
        line[part][i] = _mm512_castps_si512(half == 0 ? row.low : row.high);
      }
      turn_words(line[part], word[part]);
    }
    for (std::int64_t i = 0; i < lanes && half * lanes + i < queries; ++i)
      Words<float>{{_mm512_castsi512_ps(word[0][i]), _mm512_castsi512_ps(word[1][i])}}.store(
          to + (half * lanes + i) * stride, depth);
  }
}
template <class T>
FOR_AVX512 void store_turned(const float* x, const float* factor, std::int64_t depth, std::int64_t queries,
                             ElementOf<T>* to, std::int64_t stride) {
  const Row by = load_row(factor);
  for (std::int64_t t = 0; t < depth; t += tile_rows)
    store_turned_tile(x + t * width, by, depth - t, queries, to + t, stride);
}

template <class T>
FOR_AVX512 void load_rows(const ElementOf<T>* x, std::int64_t stride, float factor, std::int64_t rows,
                          std::int64_t cols, float* to) {
  const Row by = both(factor);
  for (std::int64_t row = 0; row < rows; ++row, x += stride, to += width)
    store_row(Words<ElementOf<T>>::load(x, cols) * by, to);
}

template <class T>
FOR_AVX512 void store_rows(const float* x, float factor, std::int64_t rows, std::int64_t cols,
                           ElementOf<T>* to, std::int64_t stride) {
  constexpr std::int64_t ahead = 16;  // rows, which may lie far apart
  const Row by = both(factor);
  for (std::int64_t row = 0; row < rows; ++row, x += width, to += stride) {
    if (row + ahead < rows) __builtin_prefetch(to + ahead * stride, 1);
    Words<ElementOf<T>>::of(load_row(x) * by).store(to, cols);
  }
}

template <class T>
constexpr ScorePasses<T> passes{.lower = lower,
                                .softmax = softmax<T>,
                                .softmax_gradient = softmax_gradient<T>,
                                .scale = scale,
                                .store_turned = store_turned<T>,
                                .load_rows = load_rows<T>,
                                .store_rows = store_rows<T>};

}  // namespace

template <>
const ScorePasses<bf16>* avx512_score_passes() {
  return has_avx512_bf16() ? &passes<bf16> : nullptr;
}
template <>
const ScorePasses<float>* avx512_score_passes() {
  return has_avx512() ? &passes<float> : nullptr;
}
template <>
const ScorePasses<ThreeParts>* avx512_score_passes() {
  return has_avx512() ? &passes<ThreeParts> : nullptr;
}
#else
template <>
const ScorePasses<bf16>* avx512_score_passes() {
  return nullptr;
}
template <>
const ScorePasses<float>* avx512_score_passes() {
  return nullptr;
}
template <>
const ScorePasses<ThreeParts>* avx512_score_passes() {
  return nullptr;
}
#endif

}  // namespace echelon
