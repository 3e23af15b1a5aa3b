// The tiles of AMX played in C++, for tests where the processor has none.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "tensor/matmul_amx.h"

namespace echelon {

// The two bf16 of a word.
inline float low(std::uint32_t word) {
  bf16 x;
  x.bits = static_cast<std::uint16_t>(word);
  return float{x};
}
inline float high(std::uint32_t word) { return low(word >> 16); }

// TDPBF16PS: adds the product of two tiles of pairs to a tile of sums.
void play_product(const std::uint32_t a[16][16], const std::uint32_t b[16][16], float sums[16][16]);

// TILELOADD, TDPBF16PS and TILESTORED as the manual writes them down.
struct PlayedUnit {
  static inline thread_local bool ready = false;
  static inline std::atomic<int> begins = 0;
  static inline thread_local std::uint32_t a[2][16][16], b[2][16][16];
  static inline thread_local float sums[2][2][16][16];

  static void begin() {
    EXPECT_FALSE(ready);
    ready = true;
    ++begins;
  }
  static void end() {
    EXPECT_TRUE(ready);
    ready = false;
  }
  static void fetch(std::uint32_t to[16][16], const std::uint32_t* from, std::int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(to[row], reinterpret_cast<const std::byte*>(from) + row * stride, 64);
  }
  static void load(const std::uint32_t* a0, const std::uint32_t* a1, std::int64_t a_stride,
                   const std::uint32_t* b0, const std::uint32_t* b1, std::int64_t b_stride) {
    load_a(a0, a1, a_stride);
    load_b(b0, b1, b_stride);
  }
  static void load_a(const std::uint32_t* a0, const std::uint32_t* a1, std::int64_t stride) {
    EXPECT_TRUE(ready);
    fetch(a[0], a0, stride), fetch(a[1], a1, stride);
  }
  static void load_b(const std::uint32_t* b0, const std::uint32_t* b1, std::int64_t stride) {
    EXPECT_TRUE(ready);
    fetch(b[0], b0, stride), fetch(b[1], b1, stride);
  }
  template <int number>
  struct Sum {
    static constexpr int s = number / 2, t = number % 2;
    static auto& sum() { return sums[s][t]; }

    static void clear() { std::memset(sum(), 0, sizeof sum()); }
    static void load(const float* from, std::int64_t stride) {
      for (int row = 0; row < 16; ++row)
        std::memcpy(sum()[row], reinterpret_cast<const std::byte*>(from) + row * stride, 64);
    }
    static void multiply() {
      EXPECT_TRUE(ready);
      play_product(a[s], b[t], sum());
    }
    static void store(float* to, std::int64_t stride) {
      for (int row = 0; row < 16; ++row)
        std::memcpy(reinterpret_cast<std::byte*>(to) + row * stride, sum()[row], 64);
    }
  };
  static void store_rows(const float* tile, std::int64_t row, std::int64_t count, const TileTarget& c) {
    matmul_passes().store(tile, amx_cols, row, count, c);
  }
};

inline constexpr MicroKernel played_kernel =
    amx_kernel_by<PlayedUnit>("played", PlayedUnit::begin, PlayedUnit::end);
inline constexpr MicroKernel played_parts_kernel =
    amx_parts_kernel_by<PlayedUnit>("played in three bf16", PlayedUnit::begin, PlayedUnit::end);

// Columns of tiles of f32, in the same layout.
void play_f32_column(const TileColumn& column);
inline constexpr MicroKernel played_f32_columns{.name = "played in f32",
                                                .rows = amx_rows,
                                                .cols = amx_cols,
                                                .group = amx_group,
                                                .column = play_f32_column};

}  // namespace echelon
