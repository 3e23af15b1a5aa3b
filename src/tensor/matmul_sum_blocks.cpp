#include "tensor/matmul_sum_blocks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/halving_tree.h"
#include "base/split.h"
#include "tensor/matmul_packed.h"
#include "tensor/matmul_packing.h"
#include "tensor/matmul_scratch.h"
#include "tensor/simd.h"

namespace echelon {
namespace {

// A range of k that is packed at once, and summed by a tile at once.
struct Segment {
  Range k;
  bool begins_block = false;
  std::int64_t filled = 0, words = 0, before = 0;  // before: words of the segments before it
};

// For blocks [begin, end).
std::vector<Segment> segments_of(const MicroKernel& kernel, const SumBlocks& blocks, std::int64_t begin,
                                 std::int64_t end) {
  std::vector<Segment> all;
  std::int64_t before = 0;
  for (std::int64_t b = begin; b < end; ++b) {
    bool begins = true;
    for (const Range& range : blocks[static_cast<std::size_t>(b)])
      for (Range k{range.begin, range.begin}; k.end < range.end;) {
        k = run_of_depth(kernel, DType::f32, range, k.end);
        Segment s{k, std::exchange(begins, false)};
        s.filled = filled_words(kernel, s.k.size());
        s.words = words_of(kernel, s.filled);
        s.before = before;
        before += s.words;
        all.push_back(s);
      }
  }
  return all;
}

// How much of blocks is packed at once: deeper sums would leave only small tiles, and more blocks would need
// too many sums.
constexpr std::int64_t most_segment_words = 2048, most_segment_blocks = 128;
constexpr int most_levels = most_waiting(most_segment_blocks) + 1;

// Computes the sums of one tile, by a kernel of either kind.
void make_tile(const MicroKernel& kernel, std::int64_t words, const std::uint32_t* a, const std::uint32_t* b,
               float* to) {
  if (kernel.tile != nullptr)
    kernel.tile({.words = words, .a = a, .b = b, .sums = to});
  else
    kernel.column({.words = words, .a = a, .b = b, .tiles = 1, .sums = to});
}

// All of k is packed, and the sums of its blocks stay in the L1 cache.
void multiply_segments(const MicroKernel& kernel, const Product& p, const std::vector<Segment>& segments,
                       std::int64_t blocks, const ProductScratch& scratch) {
  const Packing to_a = packing_of_a(kernel), to_b = packing_of_b(kernel);
  const std::int64_t words = segments.back().before + segments.back().words;
  const std::int64_t rows_at_once = multiple_below(kernel.a_words / words, kernel.rows),
                     cols_at_once = multiple_below(ProductScratch::b_words / words, kernel.cols);
  const auto whole = [](std::int64_t lines, int width) { return (lines + width - 1) / width * width; };
  const Simd<float>& pass = simd<float>();
  const std::int64_t tile_size = kernel.rows * kernel.cols;
  alignas(64) float sums[most_levels + 1][MicroKernel::most_rows * MicroKernel::most_cols];
  const auto sum_tile = [&](std::int64_t i, std::int64_t rows, std::int64_t j, std::int64_t cols) {
    int level = -1;
    std::int64_t block = -1;
    TreePlace place;
    const auto merge = [&] {
      for (int m = 0; m < place.merges; ++m, --level) pass.add(sums[level], sums[level - 1], tile_size);
    };
    for (const Segment& s : segments) {
      if (s.begins_block) {
        if (block >= 0) merge();
        place = tree_place(blocks, ++block);
        level = place.waiting;
      }
      float* const to = s.begins_block ? sums[level] : sums[most_levels];
      make_tile(kernel, s.words, scratch.a + s.before * whole(rows, kernel.rows) + i * s.words,
                scratch.b + s.before * whole(cols, kernel.cols) + j * s.words, to);
      if (!s.begins_block) pass.add(to, sums[level], tile_size);
    }
    merge();
  };
  for (std::int64_t j = 0; j < p.n; j += cols_at_once) {
    const std::int64_t cols = std::min(cols_at_once, p.n - j);
    for (const Segment& s : segments)
      pack(p.b, p.tb == Transpose::yes, to_b, j, cols, s.k, s.filled, s.words,
           scratch.b + s.before * whole(cols, kernel.cols));
    for (std::int64_t i = 0; i < p.m; i += rows_at_once) {
      const std::int64_t rows = std::min(rows_at_once, p.m - i);
      for (const Segment& s : segments)
        pack(p.a, p.ta == Transpose::no, to_a, i, rows, s.k, s.filled, s.words,
             scratch.a + s.before * whole(rows, kernel.rows));
      if (kernel.begin != nullptr) kernel.begin();
      for (std::int64_t jj = 0; jj < cols; jj += kernel.cols)
        for (std::int64_t ii = 0; ii < rows; ii += kernel.rows) {
          const TileTarget c =
              target_of(at(p.c, i + ii, j + jj), std::min<std::int64_t>(kernel.rows, rows - ii),
                        std::min<std::int64_t>(kernel.cols, cols - jj), p.alpha, p.beta);
          sum_tile(ii, rows, jj, cols);
          store(sums[0], kernel.cols, c);
        }
      if (kernel.end != nullptr) kernel.end();
    }
  }
}

// The sum of blocks [begin, end) into `to`, (m, n) floats; more partial sums are kept in the memory after it.
void sum_blocks(const MicroKernel& kernel, const Product& p, std::int64_t begin, std::int64_t end,
                const ProductScratch& scratch, float* to) {
  Product q = p;
  q.c = {to, p.n};
  q.alpha = 1, q.beta = 0;
  const std::vector<Segment> segments = segments_of(kernel, *p.blocks, begin, end);
  if (end - begin == 1 && segments.back().before + segments.back().words > most_segment_words) {
    for (const Range& range : (*p.blocks)[static_cast<std::size_t>(begin)]) {
      q.k = range.size();
      q.a = at(p.a, p.ta, 0, range.begin);
      q.b = at(p.b, p.tb, range.begin, 0);
      multiply_packed(kernel, q, scratch);
      q.beta = 1;
    }
  } else if (end - begin <= most_segment_blocks &&
             segments.back().before + segments.back().words <= most_segment_words) {
    multiply_segments(kernel, q, segments, end - begin, scratch);
  } else {
    const std::int64_t middle = halving_cut(begin, end);
    sum_blocks(kernel, p, begin, middle, scratch, to);
    sum_blocks(kernel, p, middle, end, scratch, to + p.m * p.n);
    simd<float>().add(to + p.m * p.n, to, p.m * p.n);
  }
}

}  // namespace

void multiply_by_blocks(const MicroKernel& kernel, const Product& p, std::byte* room) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    if (p.beta == 0) clear(p.c, p.m, p.n);
    return;
  }
  const ProductScratch scratch(room);
  const std::int64_t blocks = std::ssize(*p.blocks);
  const std::vector<Segment> segments = segments_of(kernel, *p.blocks, 0, blocks);
  if (blocks <= most_segment_blocks && segments.back().before + segments.back().words <= most_segment_words)
    return multiply_segments(kernel, p, segments, blocks, scratch);
  // If not all of k can be packed at once, partial sums of a piece of c are kept in memory.
  const std::int64_t waiting = most_waiting(blocks) + 1;
  const std::int64_t cols = std::min<std::int64_t>(256, p.n),
                     rows = std::max<std::int64_t>(1, ProductScratch::piece_floats / (waiting * cols));
  for (std::int64_t j = 0; j < p.n; j += cols)
    for (std::int64_t i = 0; i < p.m; i += rows) {
      const Product q = part(p, {i, std::min(i + rows, p.m)}, {j, std::min(j + cols, p.n)});
      sum_blocks(kernel, q, 0, blocks, scratch, scratch.piece);
      store(scratch.piece, q.n, target_of(q.c, q.m, q.n, p.alpha, p.beta));
    }
}

}  // namespace echelon
