// The parts of f32 (tensor/three_parts.h) in vectors of AVX-512.
#pragma once

#if defined(__x86_64__)
#include "tensor/avx512.h"
#include "tensor/three_parts.h"

namespace echelon {

// A vector for each part.
struct PartVectors {
  __m512i of[parts_of_f32];
};

// Of 16 floats, as the upper halves of floats. Ties are rounded away from 0: the parts are others then than
// if they were rounded to even, but their sum is the same.
WITH_AVX512 inline PartVectors parts_of(__m512 x) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto rounded = [&](__m512 v) WITH_AVX512 {
    return _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(v), half), upper);
  };
  const __m512i first = rounded(x);
  const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(first));
  const __m512i second = rounded(rest);
  return {{first, second, _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(second)))}};
}

// Words of an element of one vector and of the same element of another.
WITH_AVX512 inline PartVectors words_of_parts(const PartVectors& x, const PartVectors& y) {
  constexpr __mmask16 all = 0xffff;         // GCC warns if there is no mask
  constexpr int second_where_first = 0xca;  // of three operands; elsewhere the third
  PartVectors words;
#pragma GCC unroll 3
  for (int part = 0; part < parts_of_f32; ++part)
    words.of[part] =
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(0xffff0000u)), y.of[part],
                                  _mm512_maskz_srli_epi32(all, x.of[part], 16), second_where_first);
  return words;
}

// Words of neighbours, of the 32 elements of two vectors.
class NeighbourWords {
 public:
  WITH_AVX512 NeighbourWords() {
    alignas(64) std::uint16_t places[32];
    for (std::uint16_t i = 0; i < 32; ++i) places[i] = static_cast<std::uint16_t>(2 * i + 1);
    upper_ = _mm512_load_si512(places);
  }
  WITH_AVX512 PartVectors words(const PartVectors& x, const PartVectors& y) const {
    PartVectors words;
#pragma GCC unroll 3
    for (int part = 0; part < parts_of_f32; ++part)
      words.of[part] = _mm512_permutex2var_epi16(x.of[part], upper_, y.of[part]);
    return words;
  }

 private:
  __m512i upper_;
};

}  // namespace echelon
#endif
