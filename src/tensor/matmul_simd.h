// What of a matrix product is written for each instruction set: packing, the inmost loop, and storing. Packed
// operands are words of 32 bits, each an f32, or two bf16 that follow each other along k.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bf16.h"

namespace echelon {

// Where a tile will be stored, if it is known. Rows stand `stride` bytes apart.
struct TileTarget {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;

  // Brings a row into the nearest cache: whatever lies in a line that it may touch.
  void fetch(std::int64_t row) const {
    const std::byte* const from = data + row * stride;
    __builtin_prefetch(from);
    __builtin_prefetch(from + 64);
    __builtin_prefetch(from + 127);
  }
};

// Makes a tile of c.
struct MicroKernel {
  const char* name = "";
  int rows = 0, cols = 0;
  bool pairs = false;  // words are two bf16, which are added in one go
  // So many words of a row of a stand side by side: word w of row i is a[(w / group * rows + i) * group + w %
  // group]. `words` is a multiple of it, made up with zeros.
  int group = 1;
  // How many words of k are packed at once: where sums wait in c, and where c is bf16, in which they cannot.
  std::int64_t depth = 512, whole_depth = 512;
  // Of a is packed so much at once that it stays in the L2 cache while it meets a block of b.
  std::int64_t a_words = 64 * 1024;
  // tile (rows, cols), element (i, j) = the sum of a's word w of row i times b[w * cols + j], in the order of
  // w < words. Made of so many words, it displaces what it will be stored to: that is fetched near its end.
  void (*tile)(std::int64_t words, const std::uint32_t* a, const std::uint32_t* b, float* tile,
               TileTarget target) = nullptr;
  // Called by a thread before some tiles, and after them, where the processor is to be told.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;

  static constexpr int most_rows = 32, most_cols = 32;
  static constexpr std::int64_t most_a_words = 112 * 1024;
};

// By FMA, on every processor.
const MicroKernel& f32_micro_kernel();
// Of bf16: by AMX, by AVX-512; null where the processor has them not.
const MicroKernel* amx_micro_kernel();
const MicroKernel* avx512_micro_kernel();
// The fastest of these, or null.
const MicroKernel* bf16_micro_kernel();

struct MatmulPasses {
  using Size = std::int64_t;

  // to[w * width + r] = the word at w of line r < lines, zero for the other r < width. Along: line r begins
  // at x + r * stride and runs along k; writes up to 64 bytes behind the last word. Across: element k of line
  // r is x[k * stride + r]. Lines behind `width` may be read, and are left out.
  void (*floats_along)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*floats_across)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  // bf16 as words of one f32, or of two bf16; behind an odd k stands a zero.
  void (*widened_along)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*widened_across)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*pairs_along)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*pairs_across)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  // The same pairs, 16 words of a line side by side (MicroKernel::group), zeros behind the last of a line.
  void (*groups_along)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*groups_across)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);

  // c (rows, cols) = alpha tile + beta c; the rows of the tile stand tile_stride apart.
  void (*store_floats)(const float* tile, Size tile_stride, Size rows, Size cols, float alpha, float beta,
                       float* c, Size stride);
  void (*store_bf16)(const float* tile, Size tile_stride, Size rows, Size cols, float alpha, float beta,
                     bf16* c, Size stride);
};

const MatmulPasses& matmul_passes();

}  // namespace echelon
