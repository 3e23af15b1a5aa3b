#include "tensor/matmul.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/halving_tree.h"
#include "base/split.h"
#include "tensor/matmul_onednn.h"
#include "tensor/matmul_simd.h"
#include "tensor/simd.h"

namespace echelon {
namespace {

// What is summed in f32 before it is rounded to bf16, where k is deeper than what is packed at once.
constexpr std::int64_t piece_rows = 512, piece_cols = 512;
// Of b is packed so much at once, so that a, which is packed again for each part of b, meets whole weights of
// common models; packing may write a vector behind it.
constexpr std::int64_t b_words = 1184 * 1024, behind = 16;

constexpr std::int64_t a_room = MicroKernel::most_a_words + behind, b_room = b_words + behind,
                       piece_floats = piece_rows * piece_cols;

struct Scratch {
  std::uint32_t *a, *b;
  float* piece;
};

Scratch scratch_of(std::byte* room) {
  auto* const words = reinterpret_cast<std::uint32_t*>(room);
  return {words, words + a_room, reinterpret_cast<float*>(words + a_room + b_room)};
}

// Rows [m.begin, m.end) and columns [n.begin, n.end) of the product.
Product part(const Product& p, Range m, Range n) {
  Product q = p;
  q.m = m.size();
  q.n = n.size();
  q.a = at(p.a, p.ta, m.begin, 0);
  q.b = at(p.b, p.tb, 0, n.begin);
  q.c = at(p.c, m.begin, n.begin);
  return q;
}

// `length` cut into `parts` whose borders are multiples of 16, so that no vector of the result is shared.
Range aligned_range(std::int64_t length, std::int64_t parts, std::int64_t index) {
  const Range r = split_range((length + 15) / 16, parts, index);
  return {std::min(r.begin * 16, length), std::min(r.end * 16, length)};
}

bool by_onednn(const Product& p) {
  const bool f32 = p.a.type == DType::f32 && p.b.type == DType::f32 && p.c.type == DType::f32;
  return f32 && p.blocks == nullptr && onednn_adds_in_one_order() && p.m > 0 && p.n > 0 && p.k > 0;
}

struct Grid {
  std::int64_t rows = 1, cols = 1;
};

// How to cut the result for `threads`. A narrow one of oneDNN is cut by its shape only, since it has methods
// of its own for vectors.
Grid grid(const Product& p, int threads) {
  constexpr std::int64_t narrow = 64, piece = 128;
  const std::int64_t m = p.m, n = p.n;
  if (by_onednn(p) && std::min(m, n) < narrow)
    return m < n ? Grid{1, (n + 511) / 512} : Grid{(m + 511) / 512, 1};
  const std::int64_t most_rows = std::max<std::int64_t>(1, m / piece),
                     most_cols = std::max<std::int64_t>(1, n / piece);
  Grid best;
  std::int64_t best_pieces = 1;
  double best_border = 0;
  for (std::int64_t rows = 1; rows <= threads; ++rows) {
    const Grid g{std::min(rows, most_rows), std::min(threads / rows, most_cols)};
    const std::int64_t pieces = g.rows * g.cols;
    // What the threads read in all, a multiple of k: each row of pieces reads b, each column of pieces reads
    // a.
    const double border = static_cast<double>(g.rows * n + g.cols * m);
    if (pieces > best_pieces || (pieces == best_pieces && border < best_border)) {
      best = g;
      best_pieces = pieces;
      best_border = border;
    }
  }
  return best;
}

// How an operand is packed, by whether its lines run along k.
struct Packing {
  decltype(MatmulPasses::floats_along) floats[2];
  decltype(MatmulPasses::pairs_along) narrow[2];
  std::int64_t width;  // lines of a panel
  bool pads;           // it writes the zeros itself that make up the last words
};

Packing packing_of_b(const MicroKernel& kernel) {
  const MatmulPasses& to = matmul_passes();
  if (kernel.pairs) return {{}, {to.pairs_across, to.pairs_along}, kernel.cols, false};
  return {{to.floats_across, to.floats_along}, {to.widened_across, to.widened_along}, kernel.cols, false};
}

Packing packing_of_a(const MicroKernel& kernel) {
  const MatmulPasses& to = matmul_passes();
  if (kernel.group > 1) return {{}, {to.groups_across, to.groups_along}, kernel.rows, true};
  Packing packing = packing_of_b(kernel);
  packing.width = kernel.rows;
  return packing;
}

// `lines` lines of op(x), k long, from (line, k_begin) on, as panels of `words` words of each line, the last
// of which may be made up: `filled` are not.
void pack(const ConstPanel& x, bool along, const Packing& packing, std::int64_t line, std::int64_t lines,
          Range k, std::int64_t filled, std::int64_t words, std::uint32_t* to) {
  const std::int64_t width = packing.width, elements = filled < k.size() ? 2 : 1;  // of a word
  // Lines that run along k are read one panel after the other. Across k a few rows of all panels are read
  // together, since a panel has less of a row than what the processor fetches ahead.
  constexpr std::int64_t rows_together = 32;  // as many as a group of words has
  const std::int64_t at_once = along ? std::max<std::int64_t>(k.size(), 1) : rows_together;
  for (std::int64_t begin = 0; begin < k.size(); begin += at_once)
    for (std::int64_t done = 0; done < lines; done += width) {
      const std::int64_t depth_here = std::min(at_once, k.size() - begin);
      const ConstPanel from = at(x, along ? Transpose::no : Transpose::yes, line + done, k.begin + begin);
      std::uint32_t* const panel = to + done * words + begin / elements * width;
      if (x.type == DType::f32)
        packing.floats[along](static_cast<const float*>(from.data), x.stride, lines - done, depth_here, width,
                              panel);
      else
        packing.narrow[along](static_cast<const bf16*>(from.data), x.stride, lines - done, depth_here, width,
                              panel);
    }
  if (packing.pads) return;
  for (std::int64_t done = 0; done < lines; done += width)
    std::fill(to + done * words + filled * width, to + (done + width) * words, 0u);
}

void store(const float* sums, std::int64_t stride, std::int64_t rows, std::int64_t cols, float alpha,
           float beta, const Panel& c) {
  if (c.type == DType::f32)
    matmul_passes().store_floats(sums, stride, rows, cols, alpha, beta, static_cast<float*>(c.data),
                                 c.stride);
  else
    matmul_passes().store_bf16(sums, stride, rows, cols, alpha, beta, static_cast<bf16*>(c.data), c.stride);
}

// What a tile is stored to comes from afar while the tile is made.
void fetch_ahead(const Panel& c, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t line = 64;
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t byte = 0; byte < cols * element_bytes(c.type); byte += line)
      __builtin_prefetch(static_cast<const std::byte*>(at(c, i, 0).data) + byte, 1);
}

TileTarget target_of(const Panel& c) {
  return {static_cast<const std::byte*>(c.data), c.stride * element_bytes(c.type)};
}

const MicroKernel& kernel_for(const Product& p) {
  const MicroKernel* const pairs = bf16_micro_kernel();
  return pairs != nullptr && p.a.type == DType::bf16 && p.b.type == DType::bf16 ? *pairs : f32_micro_kernel();
}

// The elements of k that are packed at once for such a c.
std::int64_t depth_of(const MicroKernel& kernel, DType c) {
  return (kernel.pairs ? 2 : 1) * (c == DType::f32 ? kernel.depth : kernel.whole_depth);
}

std::int64_t words_of(const MicroKernel& kernel, std::int64_t filled) {
  return (filled + kernel.group - 1) / kernel.group * kernel.group;
}

std::int64_t filled_words(const MicroKernel& kernel, std::int64_t elements) {
  return kernel.pairs ? (elements + 1) / 2 : elements;
}

std::int64_t multiple_below(std::int64_t most, int step) {
  return std::max<std::int64_t>(most / step, 1) * step;
}

// What is packed next comes into the cache while tiles are made, some lines of the cache with each.
class Ahead {
 public:
  Ahead() = default;
  // `lines` lines of op(x) from `first` on.
  Ahead(const ConstPanel& x, bool along, std::int64_t first, std::int64_t lines, Range k)
      : from_(at(x, along ? Transpose::no : Transpose::yes, first, k.begin)),
        rows_(along ? lines : k.size()),
        bytes_((along ? k.size() : lines) * element_bytes(x.type)) {}

  std::int64_t cache_lines() const { return rows_ * ((bytes_ + cache_line - 1) / cache_line); }

  void fetch(std::int64_t cache_lines) {
    constexpr int not_written = 0, into_l2 = 2;
    for (; cache_lines > 0 && row_ < rows_; --cache_lines) {
      __builtin_prefetch(static_cast<const std::byte*>(at(from_, Transpose::no, row_, 0).data) + byte_,
                         not_written, into_l2);
      if (byte_ += cache_line; byte_ >= bytes_) byte_ = 0, ++row_;
    }
  }

 private:
  static constexpr std::int64_t cache_line = 64;

  ConstPanel from_{};
  std::int64_t rows_ = 0, bytes_ = 0;  // of memory
  std::int64_t row_ = 0, byte_ = 0;
};

// A packed block of a times a packed block of b, a tile at a time.
void multiply_block(const MicroKernel& kernel, std::int64_t words, const Scratch& scratch, std::int64_t rows,
                    std::int64_t cols, float alpha, float beta, const Panel& c, Ahead next) {
  alignas(64) float sums[MicroKernel::most_rows * MicroKernel::most_cols];
  const auto pieces = [](std::int64_t length, int width) { return (length + width - 1) / width; };
  const std::int64_t tiles = pieces(rows, kernel.rows) * pieces(cols, kernel.cols),
                     lines_each = (next.cache_lines() + tiles - 1) / tiles;
  if (kernel.begin != nullptr) kernel.begin();
  for (std::int64_t j = 0; j < cols; j += kernel.cols)
    for (std::int64_t i = 0; i < rows; i += kernel.rows) {
      const Panel part = at(c, i, j);
      const std::int64_t rows_here = std::min<std::int64_t>(kernel.rows, rows - i),
                         cols_here = std::min<std::int64_t>(kernel.cols, cols - j);
      fetch_ahead(part, rows_here, cols_here);
      next.fetch(lines_each);
      kernel.tile(words, scratch.a + i * words, scratch.b + j * words, sums, target_of(part));
      store(sums, kernel.cols, rows_here, cols_here, alpha, beta, part);
    }
  if (kernel.end != nullptr) kernel.end();
}

// c is f32, or k is no deeper than what is packed at once.
void multiply_blocks(const MicroKernel& kernel, const Product& p, const Scratch& scratch) {
  const Packing to_a = packing_of_a(kernel), to_b = packing_of_b(kernel);
  const bool a_along = p.ta == Transpose::no, b_along = p.tb == Transpose::yes;
  constexpr std::int64_t few_cols = 256;  // what of b is fetched into the L2 cache ahead
  const std::int64_t deep = depth_of(kernel, p.c.type);
  for (std::int64_t begin = 0; begin < p.k; begin += deep) {
    const Range k{begin, std::min(begin + deep, p.k)};
    const std::int64_t filled = filled_words(kernel, k.size()), words = words_of(kernel, filled),
                       rows_at_once = multiple_below(kernel.a_words / words, kernel.rows);
    std::int64_t cols_at_once = multiple_below(b_words / words, kernel.cols);
    // All of a is packed once for all of b.
    const bool a_fits = p.m <= rows_at_once;
    if (a_fits) {
      pack(p.a, a_along, to_a, 0, p.m, k, filled, words, scratch.a);
      cols_at_once = std::min(cols_at_once, few_cols);
    }
    for (std::int64_t j = 0; j < p.n; j += cols_at_once) {
      const std::int64_t cols = std::min(cols_at_once, p.n - j), j_end = j + cols;
      pack(p.b, b_along, to_b, j, cols, k, filled, words, scratch.b);
      for (std::int64_t i = 0; i < p.m; i += rows_at_once) {
        const std::int64_t rows = std::min(rows_at_once, p.m - i), i_end = i + rows;
        if (!a_fits) pack(p.a, a_along, to_a, i, rows, k, filled, words, scratch.a);
        Ahead next;
        if (i_end < p.m)
          next = Ahead(p.a, a_along, i_end, std::min(rows_at_once, p.m - i_end), k);
        else if (j_end < p.n)
          next = Ahead(p.b, b_along, j_end, std::min({cols_at_once, few_cols, p.n - j_end}), k);
        multiply_block(kernel, words, scratch, rows, cols, p.alpha, begin > 0 ? 1.0f : p.beta, at(p.c, i, j),
                       next);
      }
    }
  }
}

// A run of k that is packed, and summed by a tile, at once.
struct Segment {
  Range k;
  bool begins_block = false;
  std::int64_t filled = 0, words = 0, before = 0;  // before: words of the segments before it
};

// Of blocks [begin, end).
std::vector<Segment> segments_of(const MicroKernel& kernel, const SumBlocks& blocks, std::int64_t begin,
                                 std::int64_t end) {
  std::vector<Segment> all;
  std::int64_t before = 0;
  const std::int64_t deep = depth_of(kernel, DType::f32);
  for (std::int64_t b = begin; b < end; ++b) {
    bool begins = true;
    for (const Range& range : blocks[static_cast<std::size_t>(b)])
      for (std::int64_t k = range.begin; k < range.end; k += deep) {
        Segment s{{k, std::min(k + deep, range.end)}, std::exchange(begins, false)};
        s.filled = filled_words(kernel, s.k.size());
        s.words = words_of(kernel, s.filled);
        s.before = before;
        before += s.words;
        all.push_back(s);
      }
  }
  return all;
}

// What is packed at once of blocks: deeper sums leave tiles too small, and more blocks too many sums.
constexpr std::int64_t most_words = 2048, most_blocks = 128;
constexpr int most_levels = most_waiting(most_blocks) + 1;

// All of k lies packed, and the sums of its blocks stay in the cache that is nearest.
void multiply_segments(const MicroKernel& kernel, const Product& p, const std::vector<Segment>& segments,
                       std::int64_t blocks, const Scratch& scratch) {
  const Packing to_a = packing_of_a(kernel), to_b = packing_of_b(kernel);
  const std::int64_t words = segments.back().before + segments.back().words;
  const std::int64_t rows_at_once = multiple_below(kernel.a_words / words, kernel.rows),
                     cols_at_once = multiple_below(b_words / words, kernel.cols);
  const auto whole = [](std::int64_t lines, int width) { return (lines + width - 1) / width * width; };
  const Simd<float>& pass = simd<float>();
  const std::int64_t tile_size = kernel.rows * kernel.cols;
  alignas(64) float sums[most_levels + 1][MicroKernel::most_rows * MicroKernel::most_cols];
  const auto sum_tile = [&](std::int64_t i, std::int64_t rows, std::int64_t j, std::int64_t cols,
                            const Panel& c) {
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
      kernel.tile(s.words, scratch.a + s.before * whole(rows, kernel.rows) + i * s.words,
                  scratch.b + s.before * whole(cols, kernel.cols) + j * s.words, to,
                  &s == &segments.back() ? target_of(c) : TileTarget());
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
          const Panel c = at(p.c, i + ii, j + jj);
          sum_tile(ii, rows, jj, cols, c);
          store(sums[0], kernel.cols, std::min<std::int64_t>(kernel.rows, rows - ii),
                std::min<std::int64_t>(kernel.cols, cols - jj), p.alpha, p.beta, c);
        }
      if (kernel.end != nullptr) kernel.end();
    }
  }
}

// The sum of blocks [begin, end) into `to`, (m, n) floats; further sums wait in the room behind it.
void sum_blocks(const MicroKernel& kernel, const Product& p, std::int64_t begin, std::int64_t end,
                const Scratch& scratch, float* to) {
  Product q = p;
  q.c = {to, p.n};
  q.alpha = 1, q.beta = 0;
  const std::vector<Segment> segments = segments_of(kernel, *p.blocks, begin, end);
  if (end - begin == 1 && segments.back().before + segments.back().words > most_words) {
    for (const Range& range : (*p.blocks)[static_cast<std::size_t>(begin)]) {
      q.k = range.size();
      q.a = at(p.a, p.ta, 0, range.begin);
      q.b = at(p.b, p.tb, range.begin, 0);
      multiply_blocks(kernel, q, scratch);
      q.beta = 1;
    }
  } else if (end - begin <= most_blocks && segments.back().before + segments.back().words <= most_words) {
    multiply_segments(kernel, q, segments, end - begin, scratch);
  } else {
    const std::int64_t middle = halving_cut(begin, end);
    sum_blocks(kernel, p, begin, middle, scratch, to);
    sum_blocks(kernel, p, middle, end, scratch, to + p.m * p.n);
    simd<float>().add(to + p.m * p.n, to, p.m * p.n);
  }
}

}  // namespace

void clear(const Panel& c, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t i = 0; i < rows; ++i)
    std::memset(at(c, i, 0).data, 0, static_cast<std::size_t>(cols * element_bytes(c.type)));
}

Panel at(const Panel& x, std::int64_t row, std::int64_t col) {
  return {static_cast<std::byte*>(x.data) + (row * x.stride + col) * element_bytes(x.type), x.stride, x.type};
}

ConstPanel at(const ConstPanel& x, Transpose turn, std::int64_t row, std::int64_t col) {
  if (turn == Transpose::yes) std::swap(row, col);
  return {static_cast<const std::byte*>(x.data) + (row * x.stride + col) * element_bytes(x.type), x.stride,
          x.type};
}

const MicroKernel* bf16_micro_kernel() {
  return amx_micro_kernel() != nullptr ? amx_micro_kernel() : avx512_micro_kernel();
}

const char* products_in(DType dtype) {
  if (dtype == DType::f32) return onednn_adds_in_one_order() ? "oneDNN" : f32_micro_kernel().name;
  return bf16_micro_kernel() != nullptr ? bf16_micro_kernel()->name : "our FMA kernel, bf16 widened";
}

void keep_products_to_their_thread() {
  if (onednn_adds_in_one_order()) keep_onednn_to_its_thread();
}

void prepare_products() {
  if (onednn_adds_in_one_order()) prepare_onednn();
}

std::int64_t product_scratch_bytes(DType dtype) {
  return dtype == DType::f32 && onednn_adds_in_one_order() ? 0 : blocked_product_scratch_bytes();
}

std::int64_t blocked_product_scratch_bytes() { return 4 * (a_room + b_room + piece_floats); }

bool multiply(const Product& p, std::byte* room) {
  if (by_onednn(p)) return multiply_by_onednn(p);
  if (p.blocks != nullptr)
    multiply_by_blocks(kernel_for(p), p, room);
  else
    multiply_by(kernel_for(p), p, room);
  return true;
}

void multiply_by(const MicroKernel& kernel, const Product& p, std::byte* room) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    if (p.beta == 0) clear(p.c, p.m, p.n);
    return;
  }
  const Scratch scratch = scratch_of(room);
  if (p.c.type == DType::f32 || p.k <= depth_of(kernel, p.c.type)) return multiply_blocks(kernel, p, scratch);
  for (std::int64_t j = 0; j < p.n; j += piece_cols)
    for (std::int64_t i = 0; i < p.m; i += piece_rows) {
      const Range rows{i, std::min(i + piece_rows, p.m)}, cols{j, std::min(j + piece_cols, p.n)};
      Product q = part(p, rows, cols);
      q.c = {scratch.piece, cols.size()};
      q.alpha = 1, q.beta = 0;
      multiply_blocks(kernel, q, scratch);
      store(scratch.piece, cols.size(), rows.size(), cols.size(), p.alpha, p.beta, at(p.c, i, j));
    }
}

void multiply_by_blocks(const MicroKernel& kernel, const Product& p, std::byte* room) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    if (p.beta == 0) clear(p.c, p.m, p.n);
    return;
  }
  const Scratch scratch = scratch_of(room);
  const std::int64_t blocks = std::ssize(*p.blocks);
  const std::vector<Segment> segments = segments_of(kernel, *p.blocks, 0, blocks);
  if (blocks <= most_blocks && segments.back().before + segments.back().words <= most_words)
    return multiply_segments(kernel, p, segments, blocks, scratch);
  // Where not all of k is packed at once, sums of a piece of c wait in memory.
  const std::int64_t waiting = most_waiting(blocks) + 1;
  const std::int64_t cols = std::min<std::int64_t>(256, p.n),
                     rows = std::max<std::int64_t>(1, piece_floats / (waiting * cols));
  for (std::int64_t j = 0; j < p.n; j += cols)
    for (std::int64_t i = 0; i < p.m; i += rows) {
      const Product q = part(p, {i, std::min(i + rows, p.m)}, {j, std::min(j + cols, p.n)});
      sum_blocks(kernel, q, 0, blocks, scratch, scratch.piece);
      store(scratch.piece, q.n, q.m, q.n, p.alpha, p.beta, q.c);
    }
}

void multiply(std::span<const Product> products, std::byte* scratch, std::int64_t scratch_per_thread,
              const ThreadTeam& team) {
  std::vector<Product> pieces;
  for (const Product& p : products) {
    const Grid g = grid(p, team.threads());
    for (std::int64_t i = 0; i < g.rows * g.cols; ++i)
      pieces.push_back(
          part(p, aligned_range(p.m, g.rows, i / g.cols), aligned_range(p.n, g.cols, i % g.cols)));
  }
  std::atomic<bool> ok = true;
  team.each_task(std::ssize(pieces), [&](std::int64_t i, int thread) {
    if (!multiply(pieces[static_cast<std::size_t>(i)], scratch + thread * scratch_per_thread)) ok = false;
  });
  if (ok) return;
  const Product& p = products.front();
  fail("out of memory: oneDNN has none left for the product ({}, {}) x ({}, {})", p.m, p.k, p.k, p.n);
}

}  // namespace echelon
