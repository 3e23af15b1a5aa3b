// Products of packed operands, on one thread: panels of b, and blocks of a that stay in the L2 cache, are
// multiplied a column of tiles at a time. Few rows of a meet b as it lies in memory. Blocking and packing
// follow Goto & van de Geijn 2008 (https://doi.org/10.1145/1356052.1356053).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/matmul_product.h"
#include "tensor/matmul_scratch.h"
#include "tensor/matmul_simd.h"

namespace echelon {

// By a kernel that supports the operands' types, whatever `blocks` says. `scratch`: ProductScratch::bytes
// bytes, aligned to 64.
void multiply_by(const MicroKernel& kernel, const Product& product, std::byte* scratch);

// What follows is for products that are put together in other ways: by a team, and from blocks of k.

// Whether no f32 sums must wait to be rounded, as they do for a bf16 c if k is deeper than what is packed at
// once.
bool is_summed_where_it_lies(const MicroKernel& kernel, const Product& p);
// Such a product, of k > 0.
void multiply_packed(const MicroKernel& kernel, const Product& p, const ProductScratch& scratch);

// Whether b is read once, as it lies, for few rows of a.
bool is_thin(const MicroKernel& kernel, const Product& p);
// Whether all of a is packed at once, for all of b.
bool is_short(const MicroKernel& kernel, const Product& p);
// Whether to bypass the caches: c is large and written once, in whole cache lines.
bool goes_past_caches(const MicroKernel& kernel, const Product& p);

// How many rows of a, `words` deep, are packed at once. Blocks are equal, since a small last block would use
// each panel of b for little work.
std::int64_t rows_of_block(const MicroKernel& kernel, std::int64_t words, std::int64_t m);
// Multiplies a packed block of a by a packed block of b, a column of tiles at a time. `next`: what to
// prefetch meanwhile.
void multiply_block(const MicroKernel& kernel, std::int64_t words, const ProductScratch& scratch,
                    std::int64_t rows, std::int64_t cols, float alpha, float beta, bool past_caches,
                    const Panel& c, Ahead next);

// c becomes alpha sums + beta c; `stride`: floats from a row of sums to the next.
inline TileTarget target_of(const Panel& c, std::int64_t rows, std::int64_t cols, float alpha, float beta) {
  return {.data = static_cast<std::byte*>(c.data),
          .stride = c.stride * element_bytes(c.type),
          .rows = rows,
          .cols = cols,
          .alpha = alpha,
          .beta = beta,
          .narrow = c.type == DType::bf16};
}
inline void store(const float* sums, std::int64_t stride, const TileTarget& target) {
  matmul_passes().store(sums, stride, 0, target.rows, target);
}

}  // namespace echelon
