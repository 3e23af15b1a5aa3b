// What of a matrix product is written for each instruction set: packing, the inmost loop, and storing. Packed
// operands are words of 32 bits, each an f32, or two bf16 that follow each other along k.
#pragma once

#include <algorithm>
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

  // Whether a kernel with tiles of (whole_rows, whole_cols) stores it itself.
  bool is_plain(std::int64_t whole_rows, std::int64_t whole_cols) const {
    return rows == whole_rows && cols == whole_cols && alpha == 1 && (!narrow || beta == 0);
  }

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

  // What comes behind the last line of this.
  void then(Ahead* further) { further_ = further; }

  std::int64_t cache_lines() const {
    const std::int64_t here = (rows_ - row_) * ((bytes_ + cache_line - 1) / cache_line);
    return further_ == nullptr ? here : here + further_->cache_lines();
  }

  void fetch(std::int64_t cache_lines) {
    constexpr int not_written = 0, into_l2 = 2;
    for (; cache_lines > 0 && row_ < rows_; --cache_lines) {
      __builtin_prefetch(from_ + row_ * stride_ + byte_, not_written, into_l2);
      if (byte_ += cache_line; byte_ >= bytes_) byte_ = 0, ++row_;
    }
    if (cache_lines > 0 && further_ != nullptr) further_->fetch(cache_lines);
  }

 private:
  static constexpr std::int64_t cache_line = 64;

  const std::byte* from_ = nullptr;
  std::int64_t rows_ = 0, bytes_ = 0, stride_ = 0;
  std::int64_t row_ = 0, byte_ = 0;
  Ahead* further_ = nullptr;
};

// A panel of a times a panel of b.
struct Tile {
  std::int64_t words = 0;
  const std::uint32_t *a = nullptr, *b = nullptr;
  float* sums = nullptr;               // (rows, cols): where it is left if it is not stored
  const TileTarget* target = nullptr;  // null: it is not stored
  // What is brought near beside it, so many lines of it.
  Ahead* next = nullptr;
  std::int64_t next_lines = 0;
};

// What is fetched while a tile of so many rows is made, a little before each word, since the processor can
// wait for few lines at a time. A deep tile displaces what it is stored to: that comes last.
class FetchBeside {
 public:
  FetchBeside(const Tile& tile, std::int64_t rows)
      : tile_(tile),
        each_((tile.next_lines * run + tile.words - 1) / std::max<std::int64_t>(tile.words, 1)),
        stores_from_(tile.target == nullptr ? tile.words : tile.words - rows) {}

  void before(std::int64_t word) {
    if (word % run == 0 && each_ > 0) tile_.next->fetch(each_);
    if (word >= stores_from_) tile_.target->fetch(word - stores_from_);
  }

 private:
  static constexpr std::int64_t run = 8;  // words

  const Tile& tile_;
  std::int64_t each_, stores_from_;
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
  // Element (i, j) = the sum of a's word w of row i times b[w * cols + j], in the order of w < words. A whole
  // tile is stored from the registers, unless it is scaled or added to bf16; returns whether it was.
  bool (*tile)(const Tile& tile) = nullptr;
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
  // Across k so many elements of each panel are packed before more of the first one: a panel has less of a
  // row than what the processor fetches ahead.
  static constexpr Size rows_together = 32;

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
