// The parts of a matrix product that are written for each instruction set: packing, the innermost loop, and
// storing. Packed operands are 32-bit words, each an f32, or two bf16 that are consecutive along k.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/bf16.h"

namespace echelon {

// Where tiles are stored: `rows` rows of c, `stride` bytes apart, become alpha tile + beta c. `narrow`: bf16
// instead of floats. `past_caches`: c is larger than a cache, and its rows begin at cache lines.
struct TileTarget {
  std::byte* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0, cols = 0;
  float alpha = 1, beta = 0;
  bool narrow = false, past_caches = false;

  // Whether a kernel with tiles of (whole_rows, whole_cols) can store it itself.
  bool is_plain(std::int64_t whole_rows, std::int64_t whole_cols) const {
    return rows == whole_rows && cols == whole_cols && alpha == 1 && (!narrow || beta == 0);
  }

  // Prefetches a row into the L1 cache: all cache lines that it may touch.
  void fetch(std::int64_t row) const {
    const std::byte* const from = data + row * stride;
    __builtin_prefetch(from);
    __builtin_prefetch(from + 64);
    __builtin_prefetch(from + 127);
  }
};

// Memory that will be read soon; fetch() prefetches some of its cache lines into the L2 cache.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* from, std::int64_t rows, std::int64_t bytes, std::int64_t stride)
      : from_(static_cast<const std::byte*>(from)), rows_(rows), bytes_(bytes), stride_(stride) {}

  // Memory to continue with after this.
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
  float* sums = nullptr;               // (rows, cols): the result, if it is not stored
  const TileTarget* target = nullptr;  // null: not stored
  // What to prefetch meanwhile, and how many cache lines of it.
  Ahead* next = nullptr;
  std::int64_t next_lines = 0;
};

// Prefetches while a tile is computed, a little before each word, since the processor can wait for only a few
// cache lines at a time. The tile's target comes last, since a deep tile would displace it.
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

// Where a's words are for a kernel with groups (MicroKernel::group): packed, as here, or as rows of memory.
struct GroupedRows {
  std::int64_t row_bytes = 64;     // from a row to the next
  std::int64_t group_words = 512;  // from a group to the next

  // Rows of bf16, `stride` apart, which hold whole groups.
  static GroupedRows of_memory(std::int64_t stride) { return {2 * stride, 16}; }
  bool operator==(const GroupedRows&) const = default;
};

// Tiles below each other: panels of a, a_tile words apart, times one panel of b.
struct TileColumn {
  std::int64_t words = 0;
  const std::uint32_t *a = nullptr, *b = nullptr;
  std::int64_t a_tile = 0, tiles = 0;
  GroupedRows a_rows = {};
  // The sums of earlier words, tile after tile, which are continued. null: starts from zero.
  const float* before = nullptr;
  // Where the sums go, tile after tile; if tiles are stored, temporary memory for two tiles.
  float* sums = nullptr;
  const TileTarget* target = nullptr;  // for the first tile; null: not stored
  // What to prefetch meanwhile, and how many cache lines of it in all.
  Ahead* next = nullptr;
  std::int64_t next_lines = 0;
};

// A few rows of a times b as it lies in memory.
struct ThinProduct {
  const std::uint32_t* a = nullptr;  // packed, as for a tile
  const bf16* b = nullptr;
  std::int64_t stride = 0;
  bool along = false;                      // whether a column's elements are contiguous, rather than a row's
  std::int64_t rows = 0, cols = 0, k = 0;  // k in elements
  float* sums = nullptr;                   // MicroKernel::thin_rows rows of MicroKernel::thin_cols
};

// Computes tiles of c.
struct MicroKernel {
  const char* name = "";
  int rows = 0, cols = 0;
  bool pairs = false;  // words are two bf16, multiplied and added by one instruction
  // How many words of a row of a are contiguous: word w of row i is a[(w / group * rows + i) * group + w %
  // group]. `words` is a multiple of it, filled up with zeros.
  int group = 1;
  // How many bf16 an f32 is the sum of (tensor/three_parts.h). Each `group` words of all lines are those of
  // their largest parts, followed by `group` words of each further part; `words` counts all parts'.
  int parts = 1;
  // How many words of k are packed at once: for an f32 c, where sums can wait; and for a bf16 c, where they
  // cannot.
  std::int64_t depth = 512, whole_depth = 512;
  // How many of them a column takes at once: later columns continue with the sums of earlier ones. 0: all.
  std::int64_t column_words = 0;
  // How many words of a are packed at once: they stay in the L2 cache while they are multiplied by a block of
  // b.
  std::int64_t a_words = 64 * 1024;
  // Across k, this many elements of each panel are packed before more of the first: few, where the processor
  // prefetches whole rows better than many parts of them.
  std::int64_t pack_rows = 32;
  // Results of at least this many bytes are stored past the caches.
  std::int64_t past_caches = std::numeric_limits<std::int64_t>::max();
  // Element (i, j) = the sum of word w of a's row i times b[w * cols + j], in the order of w < words. A whole
  // tile is stored from the registers, unless it is scaled or added to bf16; returns whether it was stored.
  bool (*tile)(const Tile& tile) = nullptr;
  // Or a whole column of such tiles; this kernel stores tiles while it computes others.
  void (*column)(const TileColumn& column) = nullptr;
  // For at most thin_rows rows and thin_cols columns: b is read once, so packing it would not pay. null:
  // always packed. Bits are those of `tile`.
  void (*thin)(const ThinProduct& product) = nullptr;
  // If the processor must be configured: a thread calls these before and after some tiles.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;

  // Words of a line that belong together.
  constexpr std::int64_t unit() const { return std::int64_t{group} * parts; }

  static constexpr int most_rows = 32, most_cols = 32;
  static constexpr std::int64_t most_tile = most_rows * most_cols;
  static constexpr std::int64_t most_a_words = 192 * 1024;
  static constexpr std::int64_t thin_rows = 4, thin_cols = 256;
};

// By FMA, on every processor.
const MicroKernel& f32_micro_kernel();
// For bf16, by AMX and by AVX-512; null if the processor lacks them. With ECHELON_AMX=off in the environment
// it counts as lacking AMX; RequestError for a value other than on and off.
const MicroKernel* amx_micro_kernel();
const MicroKernel* avx512_micro_kernel();
// The faster of these, or null.
const MicroKernel* bf16_micro_kernel();
// For f32 as three bf16 each, by AMX; null if the processor lacks it.
const MicroKernel* parts_micro_kernel();
// For f32 products of any shape that must have the same bits as parts of larger ones: the faster of these
// two.
const MicroKernel& invariant_micro_kernel();
// By columns of tiles, in AMX's layout: for bf16 by AVX-512, or by the faster of AMX and AVX-512; and for f32
// by AVX-512. null if the processor lacks them.
const MicroKernel* avx512_column_kernel();
const MicroKernel* bf16_column_kernel();
const MicroKernel* f32_column_kernel();

struct MatmulPasses {
  using Size = std::int64_t;
  // to[w * width + r] = word w of line r < lines; zero for other r < width. Along: line r begins at x + r *
  // stride and runs along k; may write up to 64 bytes beyond the last word. Across: element k of line r is
  // x[k * stride + r]. Lines beyond `width` may be read, but are ignored.
  void (*floats_along)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*floats_across)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  // bf16 as words of one f32, or of two bf16; a zero follows an odd k.
  void (*widened_along)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*widened_across)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*pairs_along)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*pairs_across)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  // The same pairs, or floats, 16 words of a line contiguous (MicroKernel::group), with zeros after the end
  // of a line.
  void (*groups_along)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*groups_across)(const bf16* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*float_groups_along)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*float_groups_across)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);

  // The first `count` rows of a tile, tile_stride apart, are stored as rows `row` and following of c.
  void (*store)(const float* tile, Size tile_stride, Size row, Size count, const TileTarget& c);
};

const MatmulPasses& matmul_passes();

}  // namespace echelon
