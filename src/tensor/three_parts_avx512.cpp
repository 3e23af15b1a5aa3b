#include "tensor/three_parts.h"

#include <algorithm>

#include "tensor/three_parts_avx512.h"

namespace echelon {

#if defined(__x86_64__)
namespace three_parts {
namespace {

using Size = std::int64_t;
using Word = std::uint32_t;

constexpr Size panel = 32, lanes = 16, group = 16, elements = 2 * group;  // of a line in a group
constexpr Size part_words = panel * group, group_words = parts_of_f32 * part_words;

WITH_AVX512 inline __mmask16 first_of_16(Size count) { return static_cast<__mmask16>(first_of_32(count)); }

// The 32 elements of a line that are in a group, of which `count` exist, as 16 words.
WITH_AVX512 inline PartVectors words_of_line(const NeighbourWords& neighbours, const float* x, Size count) {
  return neighbours.words(parts_of(_mm512_maskz_loadu_ps(first_of_16(count), x)),
                          parts_of(_mm512_maskz_loadu_ps(first_of_16(count - lanes), x + lanes)));
}

// Lines run along k. Few of them at a time, since hardware does not prefetch many streams.
FOR_AVX512 void groups_along(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  constexpr Size at_once = 4, ahead = 4 * elements;
  const NeighbourWords neighbours;
  const Size lines = std::min(there, panel);
  for (Size begin = 0; begin < panel; begin += at_once)
    for (Size at = 0; at < k; at += elements)
      for (Size r = begin; r < begin + at_once; ++r) {
        Word* const line = to + at / elements * group_words + r * group;
        PartVectors words = {};
        if (r < lines) {
          const float* const from = x + r * stride + at;
          __builtin_prefetch(from + ahead);
          __builtin_prefetch(from + ahead + lanes);
          words = words_of_line(neighbours, from, k - at);
        }
#pragma GCC unroll 3
        for (int part = 0; part < parts_of_f32; ++part)
          _mm512_storeu_si512(line + part * part_words, words.of[part]);
      }
}

FOR_AVX512 void words_along(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  const NeighbourWords neighbours;
  const Size lines = std::min(there, panel);
  for (Size at = 0; at < k; at += elements, to += group_words)
    for (Size begin = 0; begin < panel; begin += lanes) {
      __m512i line[parts_of_f32][lanes], word[lanes];
      for (Size r = 0; r < lanes; ++r) {
        PartVectors words = {};
        if (begin + r < lines) {
          const float* const from = x + (begin + r) * stride + at;
          __builtin_prefetch(from + elements);
          __builtin_prefetch(from + elements + lanes);
          words = words_of_line(neighbours, from, k - at);
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
      f(w, begin, words_of_parts(parts_of(load(2 * w)), parts_of(load(2 * w + 1))));
    }
  }
}

FOR_AVX512 void words_across(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  for (Size at = 0; at < k; at += elements, to += group_words)
    each_across(x + at * stride, stride, there, k - at,
                [&](Size w, Size begin, const PartVectors& words) WITH_AVX512 {
#pragma GCC unroll 3
                  for (int part = 0; part < parts_of_f32; ++part)
                    _mm512_storeu_si512(to + part * part_words + w * panel + begin, words.of[part]);
                });
}

FOR_AVX512 void groups_across(const float* x, Size stride, Size there, Size k, Size, Word* to) {
  for (Size at = 0; at < k; at += elements, to += group_words) {
    __m512i word[panel / lanes][parts_of_f32][group], line[lanes];
    each_across(x + at * stride, stride, there, k - at,
                [&](Size w, Size begin, const PartVectors& words) WITH_AVX512 {
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
