// The memory in which a thread computes products by our own kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/matmul_simd.h"

namespace echelon {

// Room for packed operands, for sums of c that wait, and for the sums of a column of tiles.
struct ProductScratch {
  // How much of b is packed at once: whole weights of common models, since a is packed again for each part of
  // b.
  static constexpr std::int64_t b_words = 1184 * 1024;
  // The piece of a bf16 c that is summed in f32 before it is rounded, if k is deeper than what is packed at
  // once; and for how many sums a thread has memory.
  static constexpr std::int64_t piece_rows = 512, piece_cols = 512, piece_floats = 1024 * 384;
  // The most rows in a column of tiles that continues the sums of an earlier column.
  static constexpr std::int64_t most_column_rows = 1024;
  static constexpr std::int64_t column_floats = most_column_rows * MicroKernel::most_cols;

  static constexpr std::int64_t behind = 16;  // packing may write one vector more
  static constexpr std::int64_t a_room = MicroKernel::most_a_words + behind, b_room = b_words + behind;
  static constexpr std::int64_t bytes = 4 * (a_room + b_room + piece_floats + column_floats);

  // `room`: `bytes` bytes, aligned to 64.
  explicit ProductScratch(std::byte* room)
      : a(reinterpret_cast<std::uint32_t*>(room)),
        b(a + a_room),
        piece(reinterpret_cast<float*>(b + b_room)),
        column(piece + piece_floats) {}

  std::uint32_t *a, *b;
  float *piece, *column;
};

}  // namespace echelon
