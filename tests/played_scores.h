// The passes of attention by columns in plain C++, for tests where the processor has none.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensor/score_columns.h"

namespace echelon {

template <class T>
struct PlayedScores {
  using Size = std::int64_t;
  static constexpr Size width = ScoreColumns::queries;

  static bool is_seen(const ScoreColumns& c, Size row, Size q) {
    return c.first == nullptr || (c.first[q] <= row && row < c.end[q]);
  }
  // In bf16 a word has the lower half of an even row, and the upper one of the next.
  static void put(float x, Size row, Size q, std::uint32_t* words) {
    constexpr Size per_word = 4 / sizeof(T);
    const T rounded(x);
    std::memcpy(reinterpret_cast<std::byte*>(words + row / per_word * width + q) + row % per_word * 2,
                &rounded, sizeof(T));
  }

  static void softmax(const ScoreColumns& c, float* max, float* sum, float* factor, std::uint32_t* p) {
    for (Size q = 0; q < width; ++q) {
      const float old = max[q];
      for (Size row = 0; row < c.rows; ++row)
        if (is_seen(c, row, q)) max[q] = std::max(max[q], c.scores[row * width + q]);
      float total = 0;
      for (Size row = 0; row < c.rows; ++row) {
        const float e = is_seen(c, row, q) ? std::exp(c.scale * (c.scores[row * width + q] - max[q])) : 0;
        total += e;
        put(e, row, q, p);
      }
      factor[q] = old == max[q] ? 1 : std::exp(c.scale * (old - max[q]));
      sum[q] = sum[q] * factor[q] + total;
    }
  }
  static void softmax_gradient(const ScoreColumns& c, const float* dp, const float* lse, const float* delta,
                               T* p, T* ds, Size tile_step, std::uint32_t* ds_words) {
    for (Size row = 0; row < c.rows; ++row)
      for (Size q = 0; q < width; ++q) {
        constexpr Size group = 64 / sizeof(T);  // elements of a row that are contiguous
        const Size at = row * width + q,
                   to = row / 32 * tile_step + (q / group * 32 + row % 32) * group + q % group;
        const float e = is_seen(c, row, q) ? std::exp(c.scores[at] * c.scale - lse[q]) : 0,
                    g = is_seen(c, row, q) ? e * (dp[at] - delta[q]) : 0;
        p[to] = T(e), ds[to] = T(g);
        put(g, row, q, ds_words);
      }
  }
  static void scale(float* x, Size rows, const float* factor) {
    for (Size i = 0; i < rows * width; ++i) x[i] *= factor[i % width];
  }
  static void store_turned(const float* x, const float* factor, Size depth, Size queries, T* to,
                           Size stride) {
    for (Size q = 0; q < queries; ++q)
      for (Size i = 0; i < depth; ++i) to[q * stride + i] = T(x[i * width + q] * factor[q]);
  }
  static void load_rows(const T* x, Size stride, float factor, Size rows, Size cols, float* to) {
    for (Size row = 0; row < rows; ++row)
      for (Size i = 0; i < width; ++i)
        to[row * width + i] = i < cols ? float{x[row * stride + i]} * factor : 0;
  }
  static void store_rows(const float* x, float factor, Size rows, Size cols, T* to, Size stride) {
    for (Size row = 0; row < rows; ++row)
      for (Size i = 0; i < cols; ++i) to[row * stride + i] = T(x[row * width + i] * factor);
  }
};

template <class T>
constexpr ScorePasses<T> played_scores{.softmax = PlayedScores<T>::softmax,
                                       .softmax_gradient = PlayedScores<T>::softmax_gradient,
                                       .scale = PlayedScores<T>::scale,
                                       .store_turned = PlayedScores<T>::store_turned,
                                       .load_rows = PlayedScores<T>::load_rows,
                                       .store_rows = PlayedScores<T>::store_rows};

}  // namespace echelon
