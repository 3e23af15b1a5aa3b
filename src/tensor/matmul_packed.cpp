#include "tensor/matmul_packed.h"

#include <algorithm>

#include "base/split.h"
#include "tensor/matmul_packing.h"

namespace echelon {
namespace {

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

}  // namespace

bool is_summed_where_it_lies(const MicroKernel& kernel, const Product& p) {
  return p.c.type == DType::f32 || p.k <= depth_of(kernel, p.c.type);
}

bool is_thin(const MicroKernel& kernel, const Product& p) {
  return kernel.thin != nullptr ? p.m <= MicroKernel::thin_rows : is_turned(kernel, p);
}

bool is_short(const MicroKernel& kernel, const Product& p) {
  const std::int64_t words =
      words_of(kernel, filled_words(kernel, std::min(p.k, depth_of(kernel, p.c.type))));
  return p.m <= rows_of_block(kernel, words, p.m);
}

bool goes_past_caches(const MicroKernel& kernel, const Product& p) {
  const std::int64_t element = element_bytes(p.c.type), line = 64;
  return p.beta == 0 && p.alpha == 1 && p.k <= depth_of(kernel, p.c.type) &&
         p.m * p.n * element >= kernel.past_caches && p.c.stride * element % line == 0 &&
         reinterpret_cast<std::uintptr_t>(p.c.data) % line == 0;
}

std::int64_t rows_of_block(const MicroKernel& kernel, std::int64_t words, std::int64_t m) {
  std::int64_t most = kernel.a_words / words;
  if (runs_of(kernel, words) > 1) most = std::min(most, ProductScratch::most_column_rows);
  most = multiple_below(most, kernel.rows);
  return pieces(pieces(m, pieces(m, most)), kernel.rows) * kernel.rows;
}

void multiply_block(const MicroKernel& kernel, std::int64_t words, const ProductScratch& scratch,
                    std::int64_t rows, std::int64_t cols, float alpha, float beta, bool past_caches,
                    const Panel& c, Ahead next) {
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

void multiply_packed(const MicroKernel& kernel, const Product& p, const ProductScratch& scratch) {
  const Packing to_a = packing_of_a(kernel), to_b = packing_of_b(kernel);
  const bool a_along = p.ta == Transpose::no, b_along = p.tb == Transpose::yes;
  constexpr std::int64_t few_cols = 256;  // columns of b that are prefetched into the L2 cache
  const bool past_caches = goes_past_caches(kernel, p);
  for (Range k; k.end < p.k;) {
    k = run_of_depth(kernel, p.c.type, {0, p.k}, k.end);
    const std::int64_t filled = filled_words(kernel, k.size()), words = words_of(kernel, filled),
                       rows_at_once = rows_of_block(kernel, words, p.m);
    std::int64_t cols_at_once = multiple_below(ProductScratch::b_words / words, kernel.cols);
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

void multiply_by(const MicroKernel& kernel, const Product& p, std::byte* room) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    if (p.beta == 0) clear(p.c, p.m, p.n);
    return;
  }
  const ProductScratch scratch(room);
  if (is_summed_where_it_lies(kernel, p)) return multiply_packed(kernel, p, scratch);
  for (std::int64_t j = 0; j < p.n; j += ProductScratch::piece_cols)
    for (std::int64_t i = 0; i < p.m; i += ProductScratch::piece_rows) {
      const Range rows{i, std::min(i + ProductScratch::piece_rows, p.m)},
          cols{j, std::min(j + ProductScratch::piece_cols, p.n)};
      Product q = part(p, rows, cols);
      q.c = {scratch.piece, cols.size()};
      q.alpha = 1, q.beta = 0;
      multiply_packed(kernel, q, scratch);
      store(scratch.piece, cols.size(), target_of(at(p.c, i, j), rows.size(), cols.size(), p.alpha, p.beta));
    }
}

}  // namespace echelon
