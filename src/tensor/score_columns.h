// What attention by columns (tensor/attention_columns.h) does to the tiles that its products leave: 32 floats
// of each row, a column for each query.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "tensor/three_parts.h"

namespace echelon {

// Scores of 32 queries as columns: (rows, 32), a row for each key, before they are multiplied by `scale` > 0.
// Query q sees rows [first[q], end[q]); all of them see rows [seen_begin, seen_end). Without `first` all see
// all.
struct ScoreColumns {
  static constexpr std::int64_t queries = 32;
  const float* scores = nullptr;
  std::int64_t rows = 0;  // even
  float scale = 1;
  const std::int32_t *first = nullptr, *end = nullptr;
  std::int64_t seen_begin = 0, seen_end = 0;
  // Whether all of them see this row and the next.
  bool all_see(std::int64_t row) const {
    return first == nullptr || (seen_begin <= row && row + 1 < seen_end);
  }
};

// Of attention in T: float, bf16, or float by parts (tensor/three_parts.h). Packed operands are words (32
// bits), each an f32 or two bf16; by parts, 16 words of each line are followed by 16 of its further parts.
template <class T>
struct ScorePasses {
  using Size = std::int64_t;
  using Word = std::uint32_t;
  using Element = ElementOf<T>;

  // Subtracts slope (first[q] - row step) from the score of each row and query q: what ALiBi takes off.
  void (*lower)(float* scores, Size rows, const float* first, float step, float slope);
  // For each query: updates its max (not yet scaled) and sum so far; factor becomes the weight exp(scale (max
  // - new max)) of earlier sums. p: the weights as words, a row of 32 for each key in f32, otherwise for each
  // two; 0 if not seen.
  void (*softmax)(const ScoreColumns& columns, float* max, float* sum, float* factor, Word* p);
  // p = exp(scale score - lse), ds = p (dp - delta), 0 if not seen. Stored as left operands whose rows are 32
  // keys and whose k are the queries (16 words of a row are contiguous), `tile_step` words apart; and ds also
  // as words like those above.
  void (*softmax_gradient)(const ScoreColumns& columns, const float* dp, const float* lse, const float* delta,
                           Word* p, Word* ds, Size tile_step, Word* ds_words);
  // Multiplies each of 32 columns by its factor.
  void (*scale)(float* x, Size rows, const float* factor);
  // The first `queries` columns, each multiplied by its factor, as rows of `depth` elements.
  void (*store_turned)(const float* x, const float* factor, Size depth, Size queries, Element* to,
                       Size stride);
  // Rows of `cols` elements, multiplied by one factor, as rows of 32 floats, of which the others become 0.
  void (*load_rows)(const Element* x, Size stride, float factor, Size rows, Size cols, float* to);
  // The first `cols` columns, multiplied by one factor, as rows.
  void (*store_rows)(const float* x, float factor, Size rows, Size cols, Element* to, Size stride);
};

// By AVX-512; null if the processor lacks it, or its instructions for bf16.
template <class T>
const ScorePasses<T>* avx512_score_passes();

}  // namespace echelon
