#include "played_tiles.h"

#include <algorithm>
#include <bit>

namespace echelon {

// A product of two bf16 is exact in f32, so that each sum is rounded once, as by the processor.
void play_product(const std::uint32_t a[16][16], const std::uint32_t b[16][16], float sums[16][16]) {
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n) {
        sums[m][n] += low(a[m][k]) * low(b[k][n]);
        sums[m][n] += high(a[m][k]) * high(b[k][n]);
      }
}

void play_f32_column(const TileColumn& column) {
  for (std::int64_t t = 0; t < column.tiles; ++t)
    for (std::int64_t i = 0; i < amx_rows; ++i) {
      const std::int64_t row = (t * amx_rows + i) * amx_cols;
      float sums[amx_cols] = {};
      if (column.before != nullptr) std::copy_n(column.before + row, amx_cols, sums);
      for (std::int64_t w = 0; w < column.words; ++w) {
        const std::int64_t of_a = (w / amx_group * amx_rows + i) * amx_group + w % amx_group;
        const float x = std::bit_cast<float>(column.a[t * column.a_tile + of_a]);
        for (std::int64_t j = 0; j < amx_cols; ++j)
          sums[j] += x * std::bit_cast<float>(column.b[w * amx_cols + j]);
      }
      std::copy_n(sums, amx_cols, column.sums + row);
    }
}

}  // namespace echelon
