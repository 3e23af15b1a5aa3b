// Products of bf16 by AMX: eight registers, tiles of 16 rows of 64 bytes, and one instruction that adds to a
// tile of f32 the product of two tiles of bf16 pairs (Intel 64 and IA-32 Architectures Software Developer's
// Manual, volume 1, chapter 18). The instructions are a type's functions, so that what is around them can be
// tested where there are none.
#pragma once

#include <cstdint>

#include "tensor/matmul_simd.h"

namespace echelon {

inline constexpr int amx_rows = 32, amx_cols = 32, amx_group = 16;

// What LDTILECFG reads: all eight tiles in full.
struct alignas(64) AmxTiles {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(AmxTiles) == 64);

// MicroKernel::tile by `Unit`, which has four tiles of sums, two of a and two of b. Strides are in bytes.
// clear() clears the sums, load() the others; multiply() adds to row i and column j of each sum what the
// words w of row i of its tile of a give with word j of row w of its tile of b.
template <class Unit>
void amx_tile_by(std::int64_t words, const std::uint32_t* a, const std::uint32_t* b, float* to,
                 TileTarget target) {
  constexpr std::int64_t row = 64, b_row = 4 * amx_cols, to_row = 4 * amx_cols;
  constexpr int rows_fetched = 4;  // with each of the last groups
  Unit::clear();
  for (std::int64_t w = 0; w < words; w += amx_group) {
    if (const std::int64_t behind = (words - w) / amx_group - 1;
        target.data != nullptr && behind < amx_rows / rows_fetched)
      for (int i = 0; i < rows_fetched; ++i) target.fetch(behind * rows_fetched + i);
    Unit::load(a, a + 16 * amx_group, row, b, b + 16, b_row);
    Unit::multiply();
    a += amx_rows * amx_group;
    b += amx_cols * amx_group;
  }
  float* const lower = to + 16 * amx_cols;
  Unit::store(to, to + 16, lower, lower + 16, to_row);
}

}  // namespace echelon
