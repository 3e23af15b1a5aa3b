// Numbers rounded to fp8, with one scale per tensor (base/fp8.h).
#pragma once

#include "base/bf16.h"
#include "base/fp8.h"
#include "tensor/rows/elements.h"

namespace echelon::rows {

// `back` restores the magnitude of rounded numbers; `there` is the factor before rounding.
struct Fp8Scale {
  float back, there;
};

// One block: the scale for a tensor with these `count` (at least one) largest magnitudes.
struct ChooseFp8Scale {
  const double* largest;
  std::int64_t count;
  Fp8 format;
  Fp8Scale* scale;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    double most = 0;
    for (std::int64_t i = team.lane(); i < count; i += team.lanes()) most = LargerOrNaN()(most, largest[i]);
    most = team.reduce(most, LargerOrNaN());
    if (team.lane() != 0) return;
    const float there = fp8_scale(static_cast<float>(most), format);
    *scale = {1 / there, there};
  }
};

// y = x rounded to fp8, with its magnitude restored: exact in bf16.
struct RoundToFp8 {
  Matrix<bf16> x, y;
  Fp8 format;
  const Fp8Scale* scale;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    y[i][j] = bf16(rounded_to_fp8(x[i][j] * scale->there, format) * scale->back);
  }
};

// The codes of x, row by row, or transposed, column by column. A block for each tile: through shared memory,
// both sides are read and written along lines.
struct CastToFp8 {
  static constexpr std::int64_t tile = 32;
  Matrix<bf16> x;
  bool turned;
  std::uint8_t* codes;
  Fp8 format;
  const Fp8Scale* scale;

  ECHELON_HOST_DEVICE std::int64_t num_blocks() const { return tiles(x.rows) * tiles(x.cols); }
  static constexpr std::size_t shared_bytes() { return tile * (tile + 1); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t wide = tiles(x.cols);
    const std::int64_t row = team.block() / wide * tile, col = team.block() % wide * tile;
    const std::int64_t rows = least(x.rows - row), cols = least(x.cols - col);
    const float there = scale->there;
    if (!turned) {
      for (std::int64_t i = team.lane(); i < rows * tile; i += team.lanes()) {
        const std::int64_t r = row + i / tile, c = i % tile;
        if (c < cols) codes[r * x.cols + col + c] = fp8_bits(x[r][col + c] * there, format);
      }
      return;
    }
    auto* const held = reinterpret_cast<std::uint8_t*>(team.shared());
    for (std::int64_t i = team.lane(); i < rows * tile; i += team.lanes()) {
      const std::int64_t r = i / tile, c = i % tile;
      if (c < cols) held[c * (tile + 1) + r] = fp8_bits(x[row + r][col + c] * there, format);
    }
    team.sync();
    for (std::int64_t i = team.lane(); i < cols * tile; i += team.lanes()) {
      const std::int64_t c = i / tile, r = i % tile;
      if (r < rows) codes[(col + c) * x.rows + row + r] = held[c * (tile + 1) + r];
    }
  }

 private:
  ECHELON_HOST_DEVICE static std::int64_t tiles(std::int64_t length) { return (length + tile - 1) / tile; }
  ECHELON_HOST_DEVICE static std::int64_t least(std::int64_t left) { return left < tile ? left : tile; }
};

}  // namespace echelon::rows
