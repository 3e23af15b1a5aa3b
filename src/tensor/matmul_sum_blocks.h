// A product whose sum over k is grouped in blocks, for invariant numerics: each block is one sum, and their
// sums are added by halves (base/halving_tree.h).
#pragma once

#include <cstddef>

#include "tensor/matmul_product.h"
#include "tensor/matmul_simd.h"

namespace echelon {

// On the calling thread, by a kernel that supports the operands' types. `scratch`: ProductScratch::bytes
// bytes, aligned to 64.
void multiply_by_blocks(const MicroKernel& kernel, const Product& product, std::byte* scratch);

}  // namespace echelon
