#include "tensor/three_parts.h"

#include <algorithm>

#include "tensor/avx512.h"

namespace echelon {

#if defined(__x86_64__)
namespace three_parts {
namespace {

using Size = std::int64_t;
using Word = std::uint32_t;

constexpr Size panel = 32, lanes = 16, group = 16, elements = 2 * group;  // of a line in a group
constexpr Size part_words = panel * group, group_words = parts_of_f32 * part_words;
constexpr __mmask16 whole = 0xffff;  // GCC warns if there is no mask

WITH_AVX512 inline __mmask16 first_of_16(Size count) { return static_cast<__mmask16>(first_of_32(count)); }

// The parts of two vectors, as the upper halves of floats.
struct Parts {
  __m512i of[parts_of_f32];
};
WITH_AVX512 inline Parts parts_of(__m512 x) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto rounded = [&](__m512 v) WITH_AVX512 {
    return _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(v), half), upper);
  };
  const __m512i first = rounded(x);
  const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(first));
  const __m512i second = rounded(rest);
  return {{first, second, _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(second)))}};
}

// Elements that are consecutive along k, of the same line in each lane, as words of a part.
WITH_AVX512 inline __m512i paired(__m512i first, __m512i second) {
  constexpr int second_where_mask = 0xca;  // of three operands: the second where the first is 1, or the third
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(0xffff0000u)), second,
                                   _mm512_maskz_srli_epi32(whole, first, 16), second_where_mask);
}

// The 32 elements of a line that are in a group, of which `count` exist, as 16 words of each part.
struct LineWords {
  __m512i of[parts_of_f32];
};
class Halves {
 public:
  WITH_AVX512 Halves() {
    alignas(64) std::uint16_t places[32];
    for (std::uint16_t i = 0; i < 32; ++i) places[i] = static_cast<std::uint16_t>(2 * i + 1);
    upper_ = _mm512_load_si512(places);
  }
  WITH_AVX512 LineWords words(const float* x, Size count) const {
    const Parts low = parts_of(_mm512_maskz_loadu_ps(first_of_16(count), x)),
                high = parts_of(_mm512_maskz_loadu_ps(first_of_16(count - lanes), x + lanes));
    LineWords words;
#pragma GCC unroll 3
    for (int part = 0; part < parts_of_f32; ++part)
      words.of[part] = _mm512_permutex2var_epi16(low.of[part], upper_, high.of[part]);
    return words;
  }

 private:
  __m512i upper_;
};

// Two rows, each with an element of 16 lines, as a word of each line and part.
WITH_AVX512 inline LineWords words_of_rows(__m512 first, __m512 second) {
  const Parts a = parts_of(first), b = parts_of(second);
  LineWords words;
#pragma GCC unroll 3
  for (int part = 0; part < parts_of_f32; ++part) words.of[part] = paired(a.of[part], b.of[part]);
  return words;
}

// Lines run along k. Few of them at a time, since hardware does not prefetch many streams.
FOR_AVX512 void groups_along(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  constexpr Size at_once = 4, ahead = 4 * elements;
  const Halves halves;
  const Size lines = std::min(there, panel);
  for (Size begin = 0; begin < panel; begin += at_once)
    for (Size at = 0; at < k; at += elements)
      for (Size r = begin; r < begin + at_once; ++r) {
        Word* const line = to + at / elements * group_words + r * group;
        LineWords words = {};
        if (r < lines) {
          const float* const from = x + r * stride + at;
          __builtin_prefetch(from + ahead);
          __builtin_prefetch(from + ahead + lanes);
          words = halves.words(from, k - at);
        }
#pragma GCC unroll 3
        for (int part = 0; part < parts_of_f32; ++part)
          _mm512_storeu_si512(line + part * part_words, words.of[part]);
      }
}

FOR_AVX512 void words_along(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  const Halves halves;
  const Size lines = std::min(there, panel);
  for (Size at = 0; at < k; at += elements, to += group_words)
    for (Size begin = 0; begin < panel; begin += lanes) {
      __m512i line[parts_of_f32][lanes], word[lanes];
      for (Size r = 0; r < lanes; ++r) {
        LineWords words = {};
        if (begin + r < lines) {
          const float* const from = x + (begin + r) * stride + at;
          __builtin_prefetch(from + elements);
          __builtin_prefetch(from + elements + lanes);
          words = halves.words(from, k - at);
        }
        for (int part = 0; part < parts_of_f32; ++part) line[part][r] = words.of[part];
      }
      for (int part = 0; part < parts_of_f32; ++part) {
        turn_words(line[part], word);
        for (Size w = 0; w < group; ++w)
          _mm512_storeu_si512(to + part * part_words + w * panel + begin, word[w]);
      }
    }
}

// Lines run across k: calls f(word of a group, first line of 16, their words of each part).
template <class F>
WITH_AVX512 inline void each_across(const float* x, Size stride, Size there, Size k, const F& f) {
  constexpr Size ahead = 32;  // rows; the processor does not prefetch rows of which only a part is read
  const Size lines = std::min(there, panel);
  for (Size w = 0; w < group; ++w) {
    const float* const row = x + 2 * w * stride;
    __builtin_prefetch(row + ahead * stride);
    __builtin_prefetch(row + ahead * stride + lanes);
    __builtin_prefetch(row + (ahead + 1) * stride);
    __builtin_prefetch(row + (ahead + 1) * stride + lanes);
#pragma GCC unroll 2
    for (Size begin = 0; begin < panel; begin += lanes) {
      const __mmask16 mask = first_of_16(lines - begin);
      const auto load = [&](Size at) WITH_AVX512 {
        return _mm512_maskz_loadu_ps(at < k ? mask : __mmask16{0}, row + (at - 2 * w) * stride + begin);
      };
      f(w, begin, words_of_rows(load(2 * w), load(2 * w + 1)));
    }
  }
}

FOR_AVX512 void words_across(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  for (Size at = 0; at < k; at += elements, to += group_words)
    each_across(x + at * stride, stride, there, k - at,
                [&](Size w, Size begin, const LineWords& words) WITH_AVX512 {
#pragma GCC unroll 3
                  for (int part = 0; part < parts_of_f32; ++part)
                    _mm512_storeu_si512(to + part * part_words + w * panel + begin, words.of[part]);
                });
}

FOR_AVX512 void groups_across(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  for (Size at = 0; at < k; at += elements, to += group_words) {
    __m512i word[panel / lanes][parts_of_f32][group], line[lanes];
    each_across(x + at * stride, stride, there, k - at,
                [&](Size w, Size begin, const LineWords& words) WITH_AVX512 {
                  for (int part = 0; part < parts_of_f32; ++part)
                    word[begin / lanes][part][w] = words.of[part];
                });
    for (Size half = 0; half < panel / lanes; ++half)
      for (int part = 0; part < parts_of_f32; ++part) {
        turn_words(word[half][part], line);
        for (Size r = 0; r < lanes; ++r)
          _mm512_storeu_si512(to + part * part_words + (half * lanes + r) * group, line[r]);
      }
  }
}

constexpr PartPasses passes{words_along, words_across, groups_along, groups_across};

}  // namespace
}  // namespace three_parts

const PartPasses* avx512_part_passes() { return has_avx512() ? &three_parts::passes : nullptr; }
#else
const PartPasses* avx512_part_passes() { return nullptr; }
#endif

}  // namespace echelon
