#include "tensor/matmul.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/halving_tree.h"
#include "base/split.h"
#include "tensor/matmul_onednn.h"
#include "tensor/matmul_simd.h"
#include "tensor/simd.h"
#include "tensor/three_parts.h"

namespace echelon {
namespace {

// The piece of a bf16 c that is summed in f32 before it is rounded, if k is deeper than what is packed at
// once; and for how many sums a thread has memory.
constexpr std::int64_t piece_rows = 512, piece_cols = 512, piece_floats = 1024 * 384;
// How much of b is packed at once: whole weights of common models, since a is packed again for each part of
// b. Packing may write one vector more (`behind`).
constexpr std::int64_t b_words = 1184 * 1024, behind = 16;

// The most rows in a column of tiles that continues the sums of an earlier column.
constexpr std::int64_t most_column_rows = 1024;

constexpr std::int64_t a_room = MicroKernel::most_a_words + behind, b_room = b_words + behind,
                       column_floats = most_column_rows * MicroKernel::most_cols;

struct Scratch {
  std::uint32_t *a, *b;
  float *piece, *column;
};

Scratch scratch_of(std::byte* room) {
  auto* const words = reinterpret_cast<std::uint32_t*>(room);
  auto* const floats = reinterpret_cast<float*>(words + a_room + b_room);
  return {words, words + a_room, floats, floats + piece_floats};
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

// Cuts `length` into `parts` at multiples of 16, so that no two parts share a vector of the result.
Range aligned_range(std::int64_t length, std::int64_t parts, std::int64_t index) {
  const Range r = split_range((length + 15) / 16, parts, index);
  return {std::min(r.begin * 16, length), std::min(r.end * 16, length)};
}

// Whether our kernel is faster than oneDNN, by up to a third. oneDNN multiplies without packing where packing
// would cost much beside the work. We always pack, which is worth it if b has to be turned anyway, or if many
// rows meet it. And we store results beside the next products, which counts where k is short. Elsewhere
// oneDNN is faster, by up to a sixth.
bool ours_is_faster(const Product& p) {
  constexpr double packs_below = 0.00196;  // of oneDNN
  constexpr std::int64_t fewest_rows = 64, many_rows = 1024, fewest_cols = 384, deep = 512;
  const bool onednn_packs = 1 / static_cast<double>(p.m) + 1 / static_cast<double>(p.n) < packs_below;
  const bool turns_b = p.tb == Transpose::yes && p.m >= fewest_rows && p.k >= deep;
  const bool meets_many_rows = p.m >= many_rows && (!onednn_packs || p.k <= deep);
  // With another alpha the bits differ: oneDNN multiplies it into a, and we multiply the sums.
  return p.alpha == 1 && p.n >= fewest_cols && (meets_many_rows || (turns_b && !onednn_packs));
}

// Whether our kernel gives the same bits as oneDNN: then a product may be made by either, whichever is faster
// for the part of it that a thread has.
bool ours_gives_the_same_bits() {
  static const bool does = [] {
    constexpr std::int64_t wide = 64, deep = 1300;  // two whole runs, then two halves
    std::vector<float> x(static_cast<std::size_t>(wide * deep)),
        c(static_cast<std::size_t>(wide * wide), 1.0f);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1 / static_cast<float>(i % 997 + 3);
    std::vector<float> other = c;
    std::vector<std::byte> room(static_cast<std::size_t>(product_scratch_bytes()) + 64);
    auto* const aligned = room.data() + (64 - reinterpret_cast<std::uintptr_t>(room.data()) % 64) % 64;
    Product p{.ta = Transpose::yes,
              .m = wide,
              .n = wide,
              .k = deep,
              .a = {x.data(), wide},
              .b = {x.data(), wide},
              .beta = 1,
              .c = {c.data(), wide}};
    if (!multiply_by_onednn(p)) return false;
    p.c.data = other.data();
    multiply_by(f32_micro_kernel(), p, aligned);
    return c == other;
  }();
  return does;
}

bool is_f32(const Product& p) {
  return p.a.type == DType::f32 && p.b.type == DType::f32 && p.c.type == DType::f32;
}

// Whether f32 products in three parts are faster, although operands are packed in more words.
bool is_worth_parts(const Product& p) {
  constexpr std::int64_t fewest = 64, fewest_rows = 96;
  return p.m >= fewest_rows && std::min(p.n, p.k) >= fewest;
}

// Of a whole product, since another kernel may give other bits. With blocks it depends on types alone: how a
// mesh cuts a product must not change its bits.
const MicroKernel& kernel_for(const Product& p) {
  const MicroKernel *const pairs = bf16_micro_kernel(), *const parts = parts_micro_kernel();
  if (pairs != nullptr && p.a.type == DType::bf16 && p.b.type == DType::bf16) return *pairs;
  if (!is_f32(p)) return f32_micro_kernel();
  if (p.blocks != nullptr) return invariant_micro_kernel();
  return parts != nullptr && is_worth_parts(p) ? *parts : f32_micro_kernel();
}

// Whether oneDNN makes a product, or a part of one, for which `kernel` was chosen.
bool by_onednn(const MicroKernel& kernel, const Product& p) {
  return &kernel == &f32_micro_kernel() && is_f32(p) && p.blocks == nullptr && onednn_adds_in_one_order() &&
         p.m > 0 && p.n > 0 && p.k > 0 && !(ours_is_faster(p) && ours_gives_the_same_bits());
}

struct Grid {
  std::int64_t rows = 1, cols = 1;
};

// How to cut the result for `threads`. A narrow oneDNN product is cut by its shape only, since oneDNN has
// separate methods for vectors.
Grid grid(const MicroKernel& kernel, const Product& p, int threads) {
  constexpr std::int64_t narrow = 64, piece = 128;
  const std::int64_t m = p.m, n = p.n;
  if (by_onednn(kernel, p) && std::min(m, n) < narrow)
    return m < n ? Grid{1, (n + 511) / 512} : Grid{(m + 511) / 512, 1};
  const std::int64_t most_rows = std::max<std::int64_t>(1, m / piece),
                     most_cols = std::max<std::int64_t>(1, n / piece);
  Grid best;
  std::int64_t best_pieces = 1;
  double best_border = 0;
  for (std::int64_t rows = 1; rows <= threads; ++rows) {
    const Grid g{std::min(rows, most_rows), std::min(threads / rows, most_cols)};
    const std::int64_t pieces = g.rows * g.cols;
    // How much the threads read in total, divided by k: each row of pieces reads b, each column of pieces
    // reads a.
    const double border = static_cast<double>(g.rows * n + g.cols * m);
    if (pieces > best_pieces || (pieces == best_pieces && border < best_border)) {
      best = g;
      best_pieces = pieces;
      best_border = border;
    }
  }
  return best;
}

// How an operand is packed; indices: whether its lines run along k.
struct Packing {
  decltype(MatmulPasses::floats_along) floats[2];
  decltype(MatmulPasses::pairs_along) narrow[2];
  std::int64_t width;  // lines in a panel
  // Across k, this many elements of each panel are packed before more of the first.
  std::int64_t rows;
  bool pads;  // packing fills the last words with zeros itself
  std::int64_t parts = 1;
};

Packing packing_of_b(const MicroKernel& kernel) {
  const MatmulPasses& to = matmul_passes();
  if (kernel.parts > 1) {
    const PartPasses& parts = *avx512_part_passes();
    return {{parts.words_across, parts.words_along}, {}, kernel.cols, kernel.pack_rows, true, kernel.parts};
  }
  if (kernel.pairs) return {{}, {to.pairs_across, to.pairs_along}, kernel.cols, kernel.pack_rows, false};
  return {{to.floats_across, to.floats_along},
          {to.widened_across, to.widened_along},
          kernel.cols,
          kernel.pack_rows,
          false};
}

Packing packing_of_a(const MicroKernel& kernel) {
  const MatmulPasses& to = matmul_passes();
  if (kernel.parts > 1) {
    const PartPasses& parts = *avx512_part_passes();
    return {{parts.groups_across, parts.groups_along}, {}, kernel.rows, kernel.pack_rows, true, kernel.parts};
  }
  if (kernel.group > 1) return {{}, {to.groups_across, to.groups_along}, kernel.rows, 2 * kernel.group, true};
  Packing packing = packing_of_b(kernel);
  packing.width = kernel.rows;
  return packing;
}

// Packs `lines` lines of op(x), from `line` on, over k, as panels with `words` words of each line, of which
// `filled` have elements; the others are zero.
void pack(const ConstPanel& x, bool along, const Packing& packing, std::int64_t line, std::int64_t lines,
          Range k, std::int64_t filled, std::int64_t words, std::uint32_t* to) {
  const std::int64_t width = packing.width, elements = filled < k.size() ? 2 : 1;  // in a word
  // Lines along k are read one panel after the other.
  const std::int64_t at_once = along ? std::max<std::int64_t>(k.size(), 1) : packing.rows;
  for (std::int64_t begin = 0; begin < k.size(); begin += at_once)
    for (std::int64_t done = 0; done < lines; done += width) {
      const std::int64_t depth_here = std::min(at_once, k.size() - begin);
      const ConstPanel from = at(x, along ? Transpose::no : Transpose::yes, line + done, k.begin + begin);
      std::uint32_t* const panel = to + done * words + begin / elements * width * packing.parts;
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

TileTarget target_of(const Panel& c, std::int64_t rows, std::int64_t cols, float alpha, float beta) {
  return {.data = static_cast<std::byte*>(c.data),
          .stride = c.stride * element_bytes(c.type),
          .rows = rows,
          .cols = cols,
          .alpha = alpha,
          .beta = beta,
          .narrow = c.type == DType::bf16};
}

void store(const float* sums, std::int64_t stride, const TileTarget& target) {
  matmul_passes().store(sums, stride, 0, target.rows, target);
}

// How many elements of k are packed at once for such a c.
std::int64_t depth_of(const MicroKernel& kernel, DType c) {
  return (kernel.pairs ? 2 : 1) * (c == DType::f32 ? kernel.depth : kernel.whole_depth);
}

// What is packed at once of k, or of a range of its blocks, from `from` on: whole pairs of the kernel's
// depth, then what is left, in halves if it is deeper than one. oneDNN cuts k like this, too.
Range run_of_depth(const MicroKernel& kernel, DType c, Range all, std::int64_t from) {
  const std::int64_t deep = depth_of(kernel, c), pair = 2 * deep,
                     left = std::min(pair - (from - all.begin) % pair, all.end - from);
  if (left <= deep || left == pair) return {from, from + std::min(left, deep)};
  const std::int64_t even = 2 * kernel.group;
  return {from, from + (kernel.pairs ? (left / 2 + even - 1) / even * even : (left + 1) / 2)};
}

std::int64_t words_of(const MicroKernel& kernel, std::int64_t filled) {
  return (filled + kernel.group - 1) / kernel.group * kernel.unit();
}

std::int64_t filled_words(const MicroKernel& kernel, std::int64_t elements) {
  return kernel.pairs ? (elements + 1) / 2 : elements;
}

std::int64_t multiple_below(std::int64_t most, int step) {
  return std::max<std::int64_t>(most / step, 1) * step;
}

std::int64_t pieces(std::int64_t length, std::int64_t width) { return (length + width - 1) / width; }

// Whether no f32 sums must wait to be rounded, as they do for a bf16 c if k is deeper than what is packed at
// once.
bool is_summed_where_it_lies(const MicroKernel& kernel, const Product& p) {
  return p.c.type == DType::f32 || p.k <= depth_of(kernel, p.c.type);
}

// The number of parts into which a column of `words` words is cut.
std::int64_t runs_of(const MicroKernel& kernel, std::int64_t words) {
  return kernel.column_words == 0 ? 1 : pieces(words, kernel.column_words);
}

// `lines` lines of op(x), from `first` on.
Ahead ahead(const ConstPanel& x, bool along, std::int64_t first, std::int64_t lines, Range k) {
  const std::int64_t element = element_bytes(x.type);
  return {at(x, along ? Transpose::no : Transpose::yes, first, k.begin).data, along ? lines : k.size(),
          (along ? k.size() : lines) * element, x.stride * element};
}

// Computes the sums of one tile, by a kernel of either kind.
void make_tile(const MicroKernel& kernel, std::int64_t words, const std::uint32_t* a, const std::uint32_t* b,
               float* to) {
  if (kernel.tile != nullptr)
    kernel.tile({.words = words, .a = a, .b = b, .sums = to});
  else
    kernel.column({.words = words, .a = a, .b = b, .tiles = 1, .sums = to});
}

// A column of tiles that includes the last part of k, so that tiles are stored.
void make_column(const MicroKernel& kernel, const TileColumn& column) {
  if (kernel.column != nullptr) return kernel.column(column);
  const TileTarget& all = *column.target;
  for (std::int64_t t = 0; t < column.tiles; ++t) {
    TileTarget target = all;
    target.data += t * kernel.rows * all.stride;
    target.rows = std::min<std::int64_t>(kernel.rows, all.rows - t * kernel.rows);
    const bool is_stored = kernel.tile({.words = column.words,
                                        .a = column.a + t * column.a_tile,
                                        .b = column.b,
                                        .sums = column.sums,
                                        .target = &target,
                                        .next = column.next,
                                        .next_lines = pieces(column.next_lines, column.tiles)});
    if (!is_stored) store(column.sums, kernel.cols, target);
  }
}

// Whether to bypass the caches: c is large and written once, in whole cache lines.
bool goes_past_caches(const MicroKernel& kernel, const Product& p) {
  const std::int64_t element = element_bytes(p.c.type), line = 64;
  return p.beta == 0 && p.alpha == 1 && p.k <= depth_of(kernel, p.c.type) &&
         p.m * p.n * element >= kernel.past_caches && p.c.stride * element % line == 0 &&
         reinterpret_cast<std::uintptr_t>(p.c.data) % line == 0;
}

// Multiplies a packed block of a by a packed block of b, a column of tiles at a time.
void multiply_block(const MicroKernel& kernel, std::int64_t words, const Scratch& scratch, std::int64_t rows,
                    std::int64_t cols, float alpha, float beta, bool past_caches, const Panel& c,
                    Ahead next) {
  alignas(64) float sums[2 * MicroKernel::most_tile];
  const std::int64_t runs = runs_of(kernel, words),
                     run_words = pieces(pieces(words, runs), kernel.unit()) * kernel.unit();
  const std::int64_t lines_each = pieces(next.cache_lines(), pieces(cols, kernel.cols));
  if (kernel.begin != nullptr) kernel.begin();
  for (std::int64_t j = 0; j < cols; j += kernel.cols) {
    TileTarget target =
        target_of(at(c, 0, j), rows, std::min<std::int64_t>(kernel.cols, cols - j), alpha, beta);
    target.past_caches = past_caches;
    for (std::int64_t begin = 0; begin < words; begin += run_words) {
      const std::int64_t end = std::min(begin + run_words, words);
      const std::uint32_t* const b = scratch.b + j * words + begin * kernel.cols;
      TileColumn column{.words = end - begin,
                        .a = scratch.a + begin * kernel.rows,
                        .b = b,
                        .a_tile = words * kernel.rows,
                        .tiles = pieces(rows, kernel.rows),
                        .before = begin > 0 ? scratch.column : nullptr,
                        .sums = end < words ? scratch.column : sums,
                        .target = end < words ? nullptr : &target,
                        .next = &next,
                        .next_lines = lines_each};
      if (kernel.column != nullptr) {  // b's next words follow in memory
        const bool is_last = j + kernel.cols >= cols && end == words;
        next = Ahead(b + column.words * kernel.cols, 1, is_last ? 0 : 4 * run_words * kernel.cols, 0);
        column.next_lines = next.cache_lines();
      }
      make_column(kernel, column);
    }
  }
  if (kernel.end != nullptr) kernel.end();
}

// How many rows of a, `words` deep, are packed at once. Blocks are equal, since a small last block would use
// each panel of b for little work.
std::int64_t rows_of_block(const MicroKernel& kernel, std::int64_t words, std::int64_t m) {
  std::int64_t most = kernel.a_words / words;
  if (runs_of(kernel, words) > 1) most = std::min(most, most_column_rows);
  most = multiple_below(most, kernel.rows);
  return pieces(pieces(m, pieces(m, most)), kernel.rows) * kernel.rows;
}

// Part of k, for few rows of a: such a product takes as long as reading b does.
void multiply_thin(const MicroKernel& kernel, const Product& p, Range k, const std::uint32_t* a) {
  alignas(64) float sums[MicroKernel::thin_rows * MicroKernel::thin_cols];
  for (std::int64_t j = 0; j < p.n; j += MicroKernel::thin_cols) {
    const std::int64_t cols = std::min(MicroKernel::thin_cols, p.n - j);
    kernel.thin({.a = a,
                 .b = static_cast<const bf16*>(at(p.b, p.tb, k.begin, j).data),
                 .stride = p.b.stride,
                 .along = p.tb == Transpose::yes,
                 .rows = p.m,
                 .cols = cols,
                 .k = k.size(),
                 .sums = sums});
    store(sums, MicroKernel::thin_cols,
          target_of(at(p.c, 0, j), p.m, cols, p.alpha, k.begin > 0 ? 1.0f : p.beta));
  }
}

// Whether a kernel of columns can compute the product transposed, so that the rows of b are rows of tiles,
// read where they are.
bool is_turned(const MicroKernel& kernel, const Product& p) {
  return kernel.column != nullptr && kernel.pairs && p.m <= kernel.cols && p.n >= kernel.rows &&
         p.tb == Transpose::yes && p.b.type == DType::bf16 && p.k % (2 * kernel.group) == 0 &&
         p.b.stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(p.b.data) % sizeof(std::uint32_t) == 0;
}

// Part of k of such a product. `a`: its rows, packed as the lines of a panel of b.
void multiply_turned(const MicroKernel& kernel, const Product& p, Range k, const std::uint32_t* a) {
  constexpr std::int64_t most = MicroKernel::thin_cols, size = MicroKernel::most_rows;
  alignas(64) float made[most * size], sums[size * most];
  const std::int64_t slices = pieces(p.n, most), width = kernel.rows;
  if (kernel.begin != nullptr) kernel.begin();
  for (std::int64_t s = 0; s < slices; ++s) {
    const Range cols = split_range(p.n, slices, s);
    const std::int64_t tiles = cols.size() / width, left = cols.size() % width;
    // The lines of the next slice.
    Ahead next;
    if (s + 1 < slices) next = ahead(p.b, true, cols.end, split_range(p.n, slices, s + 1).size(), k);
    const auto make = [&](std::int64_t first, std::int64_t count, float* to) {
      kernel.column({.words = k.size() / 2,
                     .a = static_cast<const std::uint32_t*>(at(p.b, p.tb, k.begin, first).data),
                     .b = a,
                     .a_tile = width * p.b.stride / 2,
                     .tiles = count,
                     .a_rows = GroupedRows::of_memory(p.b.stride),
                     .sums = to,
                     .next = &next,
                     .next_lines = next.cache_lines()});
    };
    make(cols.begin, tiles, made);
    if (left > 0)
      make(cols.end - width, 1, made + tiles * width * kernel.cols);  // columns again, and the rest
    for (std::int64_t j = 0; j < cols.size(); ++j) {
      const std::int64_t line = j < tiles * width ? j : j + width - left;
      for (std::int64_t i = 0; i < p.m; ++i) sums[i * most + j] = made[line * kernel.cols + i];
    }
    store(sums, most,
          target_of(at(p.c, 0, cols.begin), p.m, cols.size(), p.alpha, k.begin > 0 ? 1.0f : p.beta));
  }
  if (kernel.end != nullptr) kernel.end();
}

// Whether b is read once, as it lies, for few rows of a.
bool is_thin(const MicroKernel& kernel, const Product& p) {
  return kernel.thin != nullptr ? p.m <= MicroKernel::thin_rows : is_turned(kernel, p);
}

// For an f32 c, or a k that is packed at once.
void multiply_blocks(const MicroKernel& kernel, const Product& p, const Scratch& scratch) {
  const Packing to_a = packing_of_a(kernel), to_b = packing_of_b(kernel);
  const bool a_along = p.ta == Transpose::no, b_along = p.tb == Transpose::yes;
  constexpr std::int64_t few_cols = 256;  // columns of b that are prefetched into the L2 cache
  const bool past_caches = goes_past_caches(kernel, p);
  for (Range k; k.end < p.k;) {
    k = run_of_depth(kernel, p.c.type, {0, p.k}, k.end);
    const std::int64_t filled = filled_words(kernel, k.size()), words = words_of(kernel, filled),
                       rows_at_once = rows_of_block(kernel, words, p.m);
    std::int64_t cols_at_once = multiple_below(b_words / words, kernel.cols);
    // If all of a fits, it is packed once for all of b.
    const bool a_fits = p.m <= rows_at_once;
    if (a_fits) {
      const bool thin = is_thin(kernel, p), turned = thin && kernel.thin == nullptr;
      pack(p.a, a_along, turned ? to_b : to_a, 0, p.m, k, filled, words, scratch.a);
      if (thin) {
        turned ? multiply_turned(kernel, p, k, scratch.a) : multiply_thin(kernel, p, k, scratch.a);
        continue;
      }
      cols_at_once = std::min(cols_at_once, few_cols);
    }
    for (std::int64_t j = 0; j < p.n; j += cols_at_once) {
      const std::int64_t cols = std::min(cols_at_once, p.n - j), j_end = j + cols;
      pack(p.b, b_along, to_b, j, cols, k, filled, words, scratch.b);
      for (std::int64_t i = 0; i < p.m; i += rows_at_once) {
        const std::int64_t rows = std::min(rows_at_once, p.m - i), i_end = i + rows;
        if (!a_fits) pack(p.a, a_along, to_a, i, rows, k, filled, words, scratch.a);
        Ahead next, further;
        if (i_end < p.m) {
          next = ahead(p.a, a_along, i_end, std::min(rows_at_once, p.m - i_end), k);
        } else if (j_end < p.n) {
          next = ahead(p.b, b_along, j_end, std::min({cols_at_once, few_cols, p.n - j_end}), k);
        } else if (k.end < p.k) {
          const Range deeper = run_of_depth(kernel, p.c.type, {0, p.k}, k.end);
          next = ahead(p.a, a_along, 0, std::min(rows_at_once, p.m), deeper);
          further = ahead(p.b, b_along, 0, std::min(cols_at_once, p.n), deeper);
          next.then(&further);
        }
        multiply_block(kernel, words, scratch, rows, cols, p.alpha, k.begin > 0 ? 1.0f : p.beta, past_caches,
                       at(p.c, i, j), next);
      }
    }
  }
}

// Whether all of a is packed at once, for all of b.
bool is_short(const MicroKernel& kernel, const Product& p) {
  const std::int64_t words =
      words_of(kernel, filled_words(kernel, std::min(p.k, depth_of(kernel, p.c.type))));
  return p.m <= rows_of_block(kernel, words, p.m);
}

// Blocks of a that threads take one after the other, each in `groups` parts. A thread packs the block that it
// works on, so threads keep to blocks of their own until none is left, and then help others with theirs.
class BlockQueue {
 public:
  struct Task {
    std::int64_t block, group;
  };

  BlockQueue(std::int64_t blocks, std::int64_t groups)
      : groups_(groups), taken_(static_cast<std::size_t>(blocks)) {}

  // A part of the block that the thread works on (-1: none yet), or else of another; empty if all are taken.
  std::optional<Task> take(std::int64_t block) {
    if (block >= 0)
      if (const auto task = take_of(block)) return task;
    if (begun_ < std::ssize(taken_)) {
      const std::int64_t fresh = begun_++;
      if (fresh < std::ssize(taken_))
        if (const auto task = take_of(fresh)) return task;
    }
    for (std::int64_t other = std::ssize(taken_) - 1; other >= 0; --other)
      if (const auto task = take_of(other)) return task;
    return {};
  }

 private:
  std::optional<Task> take_of(std::int64_t block) {
    std::atomic<std::int64_t>& taken = taken_[static_cast<std::size_t>(block)];
    if (taken >= groups_) return {};
    const std::int64_t group = taken++;
    if (group >= groups_) return {};
    return Task{block, group};
  }

  std::int64_t groups_;
  std::atomic<std::int64_t> begun_{0};            // blocks
  std::vector<std::atomic<std::int64_t>> taken_;  // of each block
};

// A product that the threads of a team compute together, rather than one part each. b is packed once for all
// of them, and they take small parts, so that a thread whose core has other work leaves more to the others.
class TeamProduct {
 public:
  static bool is_worth_it(const MicroKernel& kernel, const Product& p, int threads) {
    constexpr double worth = 1 << 27;  // for products of this size, waiting for each other costs little
    const bool is_large =
        static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) >= worth;
    return threads > 1 && is_large && !by_onednn(kernel, p) && kernel.column != nullptr &&
           p.blocks == nullptr && !is_thin(kernel, p) &&
           !(is_short(kernel, p) && is_summed_where_it_lies(kernel, p));
  }

  TeamProduct(const MicroKernel& kernel, const Product& p, std::byte* scratch,
              std::int64_t scratch_per_thread, const ThreadTeam& team)
      : kernel_(kernel), p_(p), team_(team), past_caches_(goes_past_caches(kernel, p)) {
    for (int t = 0; t < team.threads(); ++t) rooms_.push_back(scratch_of(scratch + t * scratch_per_thread));
  }

  void make() {
    if (is_summed_where_it_lies(kernel_, p_)) return make_columns({0, p_.m});
    // As many rows as there is memory for sums, but about as many each time.
    const std::int64_t times = pieces(p_.m, piece_floats / sums_stride()),
                       most = pieces(pieces(p_.m, times), kernel_.rows) * kernel_.rows;
    for (std::int64_t i = 0; i < p_.m; i += most) make_columns({i, std::min(i + most, p_.m)});
  }

 private:
  std::int64_t threads() const { return std::ssize(rooms_); }
  Scratch& room(std::int64_t thread) { return rooms_[static_cast<std::size_t>(thread)]; }

  // The most columns whose panels are in a thread's room.
  std::int64_t most_cols(bool waits) const {
    const std::int64_t deep = depth_of(kernel_, waits ? DType::f32 : p_.c.type);
    const std::int64_t most_words = words_of(kernel_, filled_words(kernel_, std::min(deep, p_.k)));
    const std::int64_t most = multiple_below(b_words / most_words, kernel_.cols);
    return waits ? std::min(most, multiple_below(piece_cols, kernel_.cols)) : most;
  }
  // From a row of sums that wait to the next: all columns in a thread's room.
  std::int64_t sums_stride() const {
    const std::int64_t most = most_cols(true);
    return std::min(most, panels_of_room({0, std::min(p_.n, most * threads())}) * kernel_.cols);
  }

  void make_columns(Range rows) {
    const bool waits = !is_summed_where_it_lies(kernel_, p_);
    const std::int64_t most = most_cols(waits);
    for (std::int64_t first = 0; first < p_.n; first += most * threads()) {
      const Range cols{first, std::min(first + most * threads(), p_.n)};
      for (Range k; k.end < p_.k;) {
        k = run_of_depth(kernel_, waits ? DType::f32 : p_.c.type, {0, p_.k}, k.end);
        const std::int64_t filled = filled_words(kernel_, k.size()), words = words_of(kernel_, filled);
        pack_right(cols, k, filled, words);
        multiply(rows, cols, k, filled, words, waits);
      }
      if (waits) store_sums(rows, cols);
    }
  }

  // How many panels of b are in each thread's room: equally many, except in the last.
  std::int64_t panels_of_room(Range cols) const {
    return pieces(pieces(cols.size(), kernel_.cols), threads());
  }
  // Of these columns, those of panels [begin, end).
  Range columns_of(Range cols, std::int64_t begin, std::int64_t end) const {
    const auto column = [&](std::int64_t panel) {
      return std::min(cols.begin + panel * kernel_.cols, cols.end);
    };
    return {column(begin), column(end)};
  }

  // Panels of columns are whole vectors wide: packing one writes nothing beyond it.
  void pack_right(Range cols, Range k, std::int64_t filled, std::int64_t words) {
    constexpr std::int64_t at_once = 8;
    const std::int64_t of_room = panels_of_room(cols), parts = pieces(of_room, at_once);
    team_.each_task(parts * threads(), [&](std::int64_t t, int) {
      const std::int64_t thread = t / parts, from = t % parts * at_once, panel = thread * of_room + from;
      const Range mine = columns_of(cols, panel, panel + std::min(at_once, of_room - from));
      if (mine.size() > 0)
        pack(p_.b, p_.tb == Transpose::yes, packing_of_b(kernel_), mine.begin, mine.size(), k, filled, words,
             room(thread).b + from * words * kernel_.cols);
    });
  }

  void multiply(Range rows, Range cols, Range k, std::int64_t filled, std::int64_t words, bool waits) {
    // Enough parts that a slow thread delays the end only by a small part.
    constexpr std::int64_t parts_of_thread = 8, fewest_panels = 4;
    const std::int64_t blocks = pieces(rows.size(), rows_of_block(kernel_, words, rows.size())),
                       block_rows = pieces(pieces(rows.size(), blocks), kernel_.rows) * kernel_.rows;
    const std::int64_t panels = pieces(cols.size(), kernel_.cols), of_room = panels_of_room(cols);
    const std::int64_t groups =
        std::clamp<std::int64_t>(panels / fewest_panels, 1, pieces(parts_of_thread * threads(), blocks));
    BlockQueue queue(pieces(rows.size(), block_rows), groups);
    team_.each_task(threads(), [&](std::int64_t, int thread) {
      const Scratch& mine = room(thread);
      std::int64_t packed = -1;  // the block that is in `mine`
      while (const auto task = queue.take(packed)) {
        const std::int64_t i = rows.begin + task->block * block_rows,
                           here = std::min(block_rows, rows.end - i);
        if (std::exchange(packed, task->block) != task->block)
          pack(p_.a, p_.ta == Transpose::no, packing_of_a(kernel_), i, here, k, filled, words, mine.a);
        const Range part = split_range(panels, groups, task->group);
        for (std::int64_t panel = part.begin; panel < part.end;) {
          const std::int64_t owner = panel / of_room, end = std::min(part.end, (owner + 1) * of_room);
          const Range columns = columns_of(cols, panel, end);
          Scratch both = mine;
          both.b = room(owner).b + panel % of_room * words * kernel_.cols;
          const bool is_first = k.begin == 0;
          if (waits)
            multiply_block(kernel_, words, both, here, columns.size(), 1, is_first ? 0.0f : 1.0f, false,
                           at(sums_of(owner), i - rows.begin, panel % of_room * kernel_.cols), Ahead());
          else
            multiply_block(kernel_, words, both, here, columns.size(), p_.alpha, is_first ? p_.beta : 1.0f,
                           past_caches_, at(p_.c, i, columns.begin), Ahead());
          panel = end;
        }
      }
    });
  }

  // The sums for the columns whose panels are in a thread's room.
  Panel sums_of(std::int64_t thread) { return {room(thread).piece, sums_stride()}; }
  void store_sums(Range rows, Range cols) {
    const std::int64_t of_room = panels_of_room(cols);
    constexpr std::int64_t at_once = 32;
    const std::int64_t parts = pieces(rows.size(), at_once);
    team_.each_task(parts * threads(), [&](std::int64_t t, int) {
      const std::int64_t thread = t / parts, i = t % parts * at_once;
      const Range mine = columns_of(cols, thread * of_room, (thread + 1) * of_room);
      store(static_cast<const float*>(at(sums_of(thread), i, 0).data), sums_stride(),
            target_of(at(p_.c, rows.begin + i, mine.begin), std::min(at_once, rows.size() - i), mine.size(),
                      p_.alpha, p_.beta));
    });
  }

  const MicroKernel& kernel_;
  const Product& p_;
  const ThreadTeam& team_;
  bool past_caches_;
  std::vector<Scratch> rooms_;
};

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
constexpr std::int64_t most_words = 2048, most_blocks = 128;
constexpr int most_levels = most_waiting(most_blocks) + 1;

// All of k is packed, and the sums of its blocks stay in the L1 cache.
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

// A product, or a part of one, for which `kernel` was chosen. False if memory is exhausted.
bool multiply_part(const MicroKernel& kernel, const Product& p, std::byte* room) {
  if (by_onednn(kernel, p)) return multiply_by_onednn(p);
  if (p.blocks != nullptr)
    multiply_by_blocks(kernel, p, room);
  else
    multiply_by(kernel, p, room);
  return true;
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

const MicroKernel& invariant_micro_kernel() {
  return parts_micro_kernel() != nullptr ? *parts_micro_kernel() : f32_micro_kernel();
}

const MicroKernel* bf16_column_kernel() {
  return amx_micro_kernel() != nullptr ? amx_micro_kernel() : avx512_column_kernel();
}

const char* products_in(DType dtype) {
  if (dtype == DType::f32 && parts_micro_kernel() != nullptr) return parts_micro_kernel()->name;
  if (dtype == DType::f32) return onednn_adds_in_one_order() ? "oneDNN" : f32_micro_kernel().name;
  return bf16_micro_kernel() != nullptr ? bf16_micro_kernel()->name : "our FMA kernel, bf16 widened";
}

const char* multiplied_by(const Product& p, int threads) {
  const MicroKernel& kernel = kernel_for(p);
  if (TeamProduct::is_worth_it(kernel, p, threads)) return kernel.name;
  const Grid g = grid(kernel, p, threads);
  const Product first = part(p, aligned_range(p.m, g.rows, 0), aligned_range(p.n, g.cols, 0));
  return by_onednn(kernel, first) ? "oneDNN" : kernel.name;
}

void keep_products_to_their_thread() {
  if (onednn_adds_in_one_order()) keep_onednn_to_its_thread();
}

void prepare_products() {
  if (!onednn_adds_in_one_order()) return;
  prepare_onednn();
  ours_gives_the_same_bits();
}

std::int64_t product_scratch_bytes() { return 4 * (a_room + b_room + piece_floats + column_floats); }

bool multiply(const Product& p, std::byte* room) { return multiply_part(kernel_for(p), p, room); }

void multiply_by(const MicroKernel& kernel, const Product& p, std::byte* room) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    if (p.beta == 0) clear(p.c, p.m, p.n);
    return;
  }
  const Scratch scratch = scratch_of(room);
  if (is_summed_where_it_lies(kernel, p)) return multiply_blocks(kernel, p, scratch);
  for (std::int64_t j = 0; j < p.n; j += piece_cols)
    for (std::int64_t i = 0; i < p.m; i += piece_rows) {
      const Range rows{i, std::min(i + piece_rows, p.m)}, cols{j, std::min(j + piece_cols, p.n)};
      Product q = part(p, rows, cols);
      q.c = {scratch.piece, cols.size()};
      q.alpha = 1, q.beta = 0;
      multiply_blocks(kernel, q, scratch);
      store(scratch.piece, cols.size(), target_of(at(p.c, i, j), rows.size(), cols.size(), p.alpha, p.beta));
    }
}

void multiply_together(const MicroKernel& kernel, const Product& p, std::byte* scratch,
                       std::int64_t scratch_per_thread, const ThreadTeam& team) {
  if (p.m > 0 && p.n > 0) TeamProduct(kernel, p, scratch, scratch_per_thread, team).make();
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
  // If not all of k can be packed at once, partial sums of a piece of c are kept in memory.
  const std::int64_t waiting = most_waiting(blocks) + 1;
  const std::int64_t cols = std::min<std::int64_t>(256, p.n),
                     rows = std::max<std::int64_t>(1, piece_floats / (waiting * cols));
  for (std::int64_t j = 0; j < p.n; j += cols)
    for (std::int64_t i = 0; i < p.m; i += rows) {
      const Product q = part(p, {i, std::min(i + rows, p.m)}, {j, std::min(j + cols, p.n)});
      sum_blocks(kernel, q, 0, blocks, scratch, scratch.piece);
      store(scratch.piece, q.n, target_of(q.c, q.m, q.n, p.alpha, p.beta));
    }
}

void multiply(std::span<const Product> products, std::byte* scratch, std::int64_t scratch_per_thread,
              const ThreadTeam& team) {
  struct Part {
    const MicroKernel* kernel;
    Product product;
  };
  std::vector<Part> parts;
  for (const Product& p : products) {
    const MicroKernel& kernel = kernel_for(p);
    if (TeamProduct::is_worth_it(kernel, p, team.threads())) {
      multiply_together(kernel, p, scratch, scratch_per_thread, team);
      continue;
    }
    Grid g = grid(kernel, p, team.threads());
    // Here too, small parts for load balance, if b is packed for each.
    constexpr std::int64_t parts_of_thread = 8, fewest_cols = 2048;
    if (kernel.column != nullptr && g.rows == 1 && g.cols > 1)
      g.cols = std::clamp<std::int64_t>(p.n / fewest_cols, g.cols, parts_of_thread * team.threads());
    for (std::int64_t i = 0; i < g.rows * g.cols; ++i)
      parts.push_back(
          {&kernel, part(p, aligned_range(p.m, g.rows, i / g.cols), aligned_range(p.n, g.cols, i % g.cols))});
  }
  std::atomic<bool> ok = true;
  team.each_task(std::ssize(parts), [&](std::int64_t i, int thread) {
    const Part& here = parts[static_cast<std::size_t>(i)];
    if (!multiply_part(*here.kernel, here.product, scratch + thread * scratch_per_thread)) ok = false;
  });
  if (ok) return;
  const Product& p = products.front();
  fail("out of memory: oneDNN has none left for the product ({}, {}) x ({}, {})", p.m, p.k, p.k, p.n);
}

}  // namespace echelon
