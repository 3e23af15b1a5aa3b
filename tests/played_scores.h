// The passes of attention by columns in plain C++, for tests where the processor has none.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "tensor/score_columns.h"

namespace echelon {

// The three bf16 that are x, each rounded from what those before it leave; ties are rounded away from 0.
inline std::array<std::uint16_t, parts_of_f32> bits_of_parts(float x) {
  std::array<std::uint16_t, parts_of_f32> parts;
  for (std::uint16_t& part : parts) {
    const std::uint32_t bits = (std::bit_cast<std::uint32_t>(x) + 0x8000u) & 0xffff0000u;
    part = static_cast<std::uint16_t>(bits >> 16);
    x -= std::bit_cast<float>(bits);
  }
  return parts;
}

template <class T>
struct PlayedScores {
  using Size = std::int64_t;
  using Word = std::uint32_t;
  using Element = ElementOf<T>;
  static constexpr Size width = ScoreColumns::queries;

  static bool is_seen(const ScoreColumns& c, Size row, Size q) {
    return c.first == nullptr || (c.first[q] <= row && row < c.end[q]);
  }
  // As element k of a line whose w-th word is at(w).
  template <class At>
  static void put(float x, Size k, const At& at) {
    const auto put_half = [&](std::uint16_t bits, Size word) {
      std::memcpy(reinterpret_cast<std::byte*>(at(word)) + k % 2 * 2, &bits, 2);
    };
    if constexpr (std::is_same_v<T, float>) {
      *at(k) = std::bit_cast<Word>(x);
    } else if constexpr (std::is_same_v<T, bf16>) {
      put_half(bf16(x).bits, k / 2);
    } else {
      const auto parts = bits_of_parts(x);
      for (Size part = 0; part < parts_of_f32; ++part)
        put_half(parts[static_cast<std::size_t>(part)], (k / 32 * parts_of_f32 + part) * 16 + k % 32 / 2);
    }
  }
  // Of a right operand whose k are rows, and of a left one whose k are queries.
  static void put_right(float x, Size row, Size q, Word* words) {
    put(x, row, [&](Size w) { return words + w * width + q; });
  }
  static void put_left(float x, Size row, Size q, Word* tiles, Size tile_step) {
    put(x, q, [&](Size w) { return tiles + row / 32 * tile_step + (w / 16 * 32 + row % 32) * 16 + w % 16; });
  }

  static void lower(float* scores, Size rows, const float* first, float step, float slope) {
    for (Size row = 0; row < rows; ++row)
      for (Size q = 0; q < width; ++q)
        scores[row * width + q] -= slope * (first[q] - static_cast<float>(row) * step);
  }
  static void softmax(const ScoreColumns& c, float* max, float* sum, float* factor, Word* p) {
    for (Size q = 0; q < width; ++q) {
      const float old = max[q];
      for (Size row = 0; row < c.rows; ++row)
        if (is_seen(c, row, q)) max[q] = std::max(max[q], c.scores[row * width + q]);
      float total = 0;
      for (Size row = 0; row < c.rows; ++row) {
        const float e = is_seen(c, row, q) ? std::exp(c.scale * (c.scores[row * width + q] - max[q])) : 0;
        total += e;
        put_right(e, row, q, p);
      }
      factor[q] = old == max[q] ? 1 : std::exp(c.scale * (old - max[q]));
      sum[q] = sum[q] * factor[q] + total;
    }
  }
  static void softmax_gradient(const ScoreColumns& c, const float* dp, const float* lse, const float* delta,
                               Word* p, Word* ds, Size tile_step, Word* ds_words) {
    for (Size row = 0; row < c.rows; ++row)
      for (Size q = 0; q < width; ++q) {
        const Size at = row * width + q;
        const float e = is_seen(c, row, q) ? std::exp(c.scores[at] * c.scale - lse[q]) : 0,
                    g = is_seen(c, row, q) ? e * (dp[at] - delta[q]) : 0;
        put_left(e, row, q, p, tile_step);
        put_left(g, row, q, ds, tile_step);
        put_right(g, row, q, ds_words);
      }
  }
  static void scale(float* x, Size rows, const float* factor) {
    for (Size i = 0; i < rows * width; ++i) x[i] *= factor[i % width];
  }
  static void store_turned(const float* x, const float* factor, Size depth, Size queries, Element* to,
                           Size stride) {
    for (Size q = 0; q < queries; ++q)
      for (Size i = 0; i < depth; ++i) to[q * stride + i] = Element(x[i * width + q] * factor[q]);
  }
  static void load_rows(const Element* x, Size stride, float factor, Size rows, Size cols, float* to) {
    for (Size row = 0; row < rows; ++row)
      for (Size i = 0; i < width; ++i)
        to[row * width + i] = i < cols ? float{x[row * stride + i]} * factor : 0;
  }
  static void store_rows(const float* x, float factor, Size rows, Size cols, Element* to, Size stride) {
    for (Size row = 0; row < rows; ++row)
      for (Size i = 0; i < cols; ++i) to[row * stride + i] = Element(x[row * width + i] * factor);
  }
};

template <class T>
constexpr ScorePasses<T> played_scores{.lower = PlayedScores<T>::lower,
                                       .softmax = PlayedScores<T>::softmax,
                                       .softmax_gradient = PlayedScores<T>::softmax_gradient,
                                       .scale = PlayedScores<T>::scale,
                                       .store_turned = PlayedScores<T>::store_turned,
                                       .load_rows = PlayedScores<T>::load_rows,
                                       .store_rows = PlayedScores<T>::store_rows};

}  // namespace echelon
