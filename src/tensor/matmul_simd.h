// What of a matrix product is written for each instruction set: packing, the inmost loop, and storing. Packed
// operands are words of 32 bits, each an f32, or two bf16 that follow each other along k.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/bf16.h"

namespace echelon {

// Where tiles are stored: `rows` rows of c, `stride` bytes apart, that become alpha tile + beta c. `narrow`:
// of bf16, not of floats. `past_caches`: c is more than a cache holds, and its rows begin where a line of a
// cache does.
struct TileTarget {
  std::byte* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0, cols = 0;
  float alpha = 1, beta = 0;
  bool narrow = false, past_caches = false;

  // Brings a row into the nearest cache: whatever lies in a line that it may touch.
  void fetch(std::int64_t row) const {
    const std::byte* const from = data + row * stride;
    __builtin_prefetch(from);
    __builtin_prefetch(from + 64);
    __builtin_prefetch(from + 127);
  }
};

// Memory that is read soon, of which some lines of the cache are brought near at a time.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* from, std::int64_t rows, std::int64_t bytes, std::int64_t stride)
      : from_(static_cast<const std::byte*>(from)), rows_(rows), bytes_(bytes), stride_(stride) {}

  std::int64_t cache_lines() const { return (rows_ - row_) * ((bytes_ + cache_line - 1) / cache_line); }

  void fetch(std::int64_t cache_lines) {
    constexpr int not_written = 0, into_l2 = 2;
    for (; cache_lines > 0 && row_ < rows_; --cache_lines) {
      __builtin_prefetch(from_ + row_ * stride_ + byte_, not_written, into_l2);
      if (byte_ += cache_line; byte_ >= bytes_) byte_ = 0, ++row_;
    }
  }

 private:
  static constexpr std::int64_t cache_line = 64;

  const std::byte* from_ = nullptr;
  std::int64_t rows_ = 0, bytes_ = 0, stride_ = 0;
  std::int64_t row_ = 0, byte_ = 0;
};

// Tiles below each other: panels of a, a_tile words apart, with one of b.
struct TileColumn {
  std::int64_t words = 0;
  const std::uint32_t *a = nullptr, *b = nullptr;
  std::int64_t a_tile = 0, tiles = 0;
  // Of all tiles, one behind the other, what words before these gave, which these go on with. null: nothing.
  const float* before = nullptr;
  // Where they go, likewise; or, where they are stored, two tiles for a while.
  float* sums = nullptr;
  const TileTarget* target = nullptr;  // of the first; null: they are not stored
  // What is brought near beside them, so many lines of it in all.
  Ahead* next = nullptr;
  std::int64_t next_lines = 0;
};

// Makes tiles of c.
struct MicroKernel {
  const char* name = "";
  int rows = 0, cols = 0;
  bool pairs = false;  // words are two bf16, which are added in one go
  // So many words of a row of a stand side by side: word w of row i is a[(w / group * rows + i) * group + w %
  // group]. `words` is a multiple of it, made up with zeros.
  int group = 1;
  // How many words of k are packed at once: where sums wait in c, and where c is bf16, in which they cannot.
  std::int64_t depth = 512, whole_depth = 512;
  // How many of them make a column at once: those behind go on with the sums of the ones before. 0: all.
  std::int64_t column_words = 0;
  // Of a is packed so much at once that it stays in the L2 cache while it meets a block of b.
  std::int64_t a_words = 64 * 1024;
  // What has so many bytes or more is stored past the caches.
  std::int64_t past_caches = std::numeric_limits<std::int64_t>::max();
  // tile (rows, cols), element (i, j) = the sum of a's word w of row i times b[w * cols + j], in the order of
  // w < words. Made of so many words, it displaces what it will be stored to: that is fetched near its end.
  void (*tile)(std::int64_t words, const std::uint32_t* a, const std::uint32_t* b, float* tile,
               const TileTarget& target) = nullptr;
  // Or a column of such tiles, which this kernel makes and stores side by side.
  void (*column)(const TileColumn& column) = nullptr;
  // Called by a thread before some tiles, and after them, where the processor is to be told.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;

  static constexpr int most_rows = 32, most_cols = 32;
  static constexpr std::int64_t most_tile = most_rows * most_cols;
  static constexpr std::int64_t most_a_words = 192 * 1024;
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

  // The first `count` rows of a tile, which stand tile_stride apart, become row `row` of c and those behind.
  void (*store)(const float* tile, Size tile_stride, Size row, Size count, const TileTarget& c);
};

const MatmulPasses& matmul_passes();

}  // namespace echelon
