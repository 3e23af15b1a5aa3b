#include <limits>

#include "tensor/avx512_bf16.h"
#include "tensor/score_columns.h"

namespace echelon {

#if defined(__x86_64__)
namespace {

#define AVX512_PASS __attribute__((target("avx512f,avx512bw,avx512dq,avx512bf16")))

constexpr std::int64_t width = ScoreColumns::queries, lanes = 16, tile_rows = 32;
constexpr float log2e = 1.44269504f;
constexpr __mmask16 whole = 0xffff;  // GCC warns if there is no mask

// 32 columns of a row.
struct Row {
  __m512 low, high;
};
WITH_AVX512_WORDS inline Row load_row(const float* x) {
  return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + lanes)};
}
WITH_AVX512_WORDS inline void store_row(Row v, float* to) {
  _mm512_storeu_ps(to, v.low);
  _mm512_storeu_ps(to + lanes, v.high);
}
WITH_AVX512_WORDS inline Row both(float x) { return {_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
WITH_AVX512_WORDS inline __m512 larger(__m512 x, __m512 y) { return _mm512_maskz_max_ps(whole, x, y); }
// y, if one of them is NaN.
WITH_AVX512_WORDS inline __m512 smaller(__m512 x, __m512 y) { return _mm512_maskz_min_ps(whole, x, y); }
WITH_AVX512_WORDS inline Row larger(Row x, Row y) { return {larger(x.low, y.low), larger(x.high, y.high)}; }
WITH_AVX512_WORDS inline Row operator+(Row x, Row y) {
  return {_mm512_add_ps(x.low, y.low), _mm512_add_ps(x.high, y.high)};
}
WITH_AVX512_WORDS inline Row operator-(Row x, Row y) {
  return {_mm512_sub_ps(x.low, y.low), _mm512_sub_ps(x.high, y.high)};
}
WITH_AVX512_WORDS inline Row operator*(Row x, Row y) {
  return {_mm512_mul_ps(x.low, y.low), _mm512_mul_ps(x.high, y.high)};
}
// Rounded to bf16; subnormal numbers become 0.
WITH_AVX512_WORDS inline __m512i narrow(Row v) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.high, v.low));
}

// 2^x, for the fraction of x by the polynomial of least relative error (8e-8) that is 1 at 0; 0 for an x so
// low that the result would be subnormal.
WITH_AVX512_WORDS inline __m512 power_of_2(__m512 x) {
  constexpr int floor_taken_off = 1;
  const __m512 f = _mm512_maskz_reduce_ps(whole, x, floor_taken_off);
  __m512 y = _mm512_set1_ps(1.86713063e-3f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.01702885e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.57999127e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40164444e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93151295e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(whole, y, x);
}
WITH_AVX512_WORDS inline Row power_of_2(Row x) { return {power_of_2(x.low), power_of_2(x.high)}; }

// Which queries see a row.
struct SeenBy {
  __mmask16 low, high;
};
class SeenRows {
 public:
  WITH_AVX512_WORDS explicit SeenRows(const ScoreColumns& c) : c_(c) {}
  WITH_AVX512_WORDS SeenBy of(std::int64_t row) const { return {half(row, 0), half(row, lanes)}; }

 private:
  WITH_AVX512_WORDS __mmask16 half(std::int64_t row, std::int64_t q) const {
    const __m512i at = _mm512_set1_epi32(static_cast<int>(row));
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(_mm512_loadu_si512(c_.first + q), at),
                                        _mm512_loadu_si512(c_.end + q), at);
  }
  const ScoreColumns& c_;
};
WITH_AVX512_WORDS inline Row if_seen(SeenBy seen, Row x, Row otherwise) {
  return {_mm512_mask_mov_ps(otherwise.low, seen.low, x.low),
          _mm512_mask_mov_ps(otherwise.high, seen.high, x.high)};
}

AVX512_PASS void softmax(const ScoreColumns& c, float* max, float* sum, float* factor, std::uint32_t* p) {
  const SeenRows seen(c);
  const PairedRows paired;
  const Row before = load_row(max), unseen = both(-std::numeric_limits<float>::infinity());
  Row most[2] = {before, before};
  for (std::int64_t row = 0; row < c.rows; row += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Row x = load_row(c.scores + (row + i) * width);
      most[i] = larger(most[i], c.all_see(row) ? x : if_seen(seen.of(row + i), x, unseen));
    }
  // The largest weight is exactly 1, however large scores are.
  const Row top = larger(most[0], most[1]), scale2 = both(c.scale * log2e);
  Row total[2] = {both(0), both(0)};
  for (std::int64_t row = 0; row < c.rows; row += 2, p += width) {
    __m512i narrowed[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Row e = power_of_2((load_row(c.scores + (row + i) * width) - top) * scale2);
      if (!c.all_see(row)) e = if_seen(seen.of(row + i), e, both(0));
      total[i] = total[i] + e;
      narrowed[i] = narrow(e);
    }
    _mm512_storeu_si512(p, paired.first_words(narrowed[0], narrowed[1]));
    _mm512_storeu_si512(p + lanes, paired.last_words(narrowed[0], narrowed[1]));
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

AVX512_PASS void softmax_gradient(const ScoreColumns& c, const float* dp, const float* lse,
                                  const float* delta, bf16* p, bf16* ds, std::int64_t tile_step,
                                  std::uint32_t* ds_pairs) {
  const SeenRows seen(c);
  const PairedRows paired;
  const Row level = load_row(lse) * both(log2e), means = load_row(delta);
  const __m512 scale2 = _mm512_set1_ps(c.scale * log2e), zero = _mm512_setzero_ps();
  for (std::int64_t row = 0; row < c.rows; row += 2, ds_pairs += width) {
    const std::int64_t to = row / tile_rows * tile_step + row % tile_rows * width;
    __m512i narrowed[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const std::int64_t at = (row + i) * width;
      const Row x = load_row(c.scores + at);
      // No weight is above 1, however large the rounding of large scores is; a NaN stays.
      Row e = power_of_2({smaller(zero, _mm512_fmsub_ps(x.low, scale2, level.low)),
                          smaller(zero, _mm512_fmsub_ps(x.high, scale2, level.high))});
      Row g = e * (load_row(dp + at) - means);
      if (!c.all_see(row)) {
        const SeenBy by = seen.of(row + i);
        e = if_seen(by, e, both(0)), g = if_seen(by, g, both(0));
      }
      narrowed[i] = narrow(g);
      _mm512_storeu_si512(p + to + i * width, narrow(e));
      _mm512_storeu_si512(ds + to + i * width, narrowed[i]);
    }
    _mm512_storeu_si512(ds_pairs, paired.first_words(narrowed[0], narrowed[1]));
    _mm512_storeu_si512(ds_pairs + lanes, paired.last_words(narrowed[0], narrowed[1]));
  }
}

AVX512_PASS void scale(float* x, std::int64_t rows, const float* factor) {
  const Row by = load_row(factor);
  for (std::int64_t row = 0; row < rows; ++row, x += width) store_row(load_row(x) * by, x);
}

AVX512_PASS void store_turned(const float* x, const float* factor, std::int64_t depth, std::int64_t queries,
                              bf16* to, std::int64_t stride) {
  const PairedRows paired;
  const Row by = load_row(factor);
  for (std::int64_t t = 0; t < depth; t += tile_rows, x += tile_rows * width) {
    const __mmask32 mask = first_bf16(depth - t);
    __m512i line[2][lanes], word[lanes];
#pragma GCC unroll 16
    for (std::int64_t i = 0; i < lanes; ++i) {
      const __m512i even = narrow(load_row(x + 2 * i * width) * by),
                    odd = narrow(load_row(x + (2 * i + 1) * width) * by);
      line[0][i] = paired.first_words(even, odd), line[1][i] = paired.last_words(even, odd);
    }
    for (std::int64_t half = 0; half < 2; ++half) {
      turn_words(line[half], word);
      for (std::int64_t i = 0; i < lanes && half * lanes + i < queries; ++i)
        _mm512_mask_storeu_epi16(to + (half * lanes + i) * stride + t, mask, word[i]);
    }
  }
}

AVX512_PASS void store_rows(const float* x, float factor, std::int64_t rows, std::int64_t cols, bf16* to,
                            std::int64_t stride) {
  const __mmask32 mask = first_bf16(cols);
  constexpr std::int64_t ahead = 16;  // rows, which may lie far apart
  const Row by = both(factor);
  for (std::int64_t row = 0; row < rows; ++row, x += width, to += stride) {
    if (row + ahead < rows) __builtin_prefetch(to + ahead * stride, 1);
    _mm512_mask_storeu_epi16(to, mask, narrow(load_row(x) * by));
  }
}

constexpr ScorePasses passes{.softmax = softmax,
                             .softmax_gradient = softmax_gradient,
                             .scale = scale,
                             .store_turned = store_turned,
                             .store_rows = store_rows};

}  // namespace

const ScorePasses* avx512_score_passes() { return has_avx512_bf16() ? &passes : nullptr; }
#else
const ScorePasses* avx512_score_passes() { return nullptr; }
#endif

}  // namespace echelon
