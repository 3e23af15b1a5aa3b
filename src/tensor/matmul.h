// Matrix products in f32 and bf16. Each element is one sum in the order of k, cut at places that depend on k
// alone: its bits do not depend on how a product is cut, by threads or by the caller. With AMX, f32 products
// are made by parts (tensor/three_parts.h) unless they are small. Other f32 products are oneDNN's with
// AVX-512, or our kernel's if it is faster and alpha is 1. Both give the same bits, which do not depend on
// threads here; but in oneDNN a product of few rows or columns, or with another alpha, may have other bits
// than as part of a larger one, and so has one that is too small for parts: invariant numerics use one kernel
// of ours for all. Blocking and packing follow Goto & van de Geijn 2008
// (https://doi.org/10.1145/1356052.1356053).
//
// Here is chosen who computes a product and how threads share it. oneDNN is called by matmul_onednn. Our own
// kernels compute the product of packed operands on one thread (matmul_packed, matmul_packing), by a team
// together (matmul_team), or with a sum that is grouped in blocks (matmul_sum_blocks). Their innermost loops
// are in matmul_simd, matmul_avx512 and matmul_amx.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/matmul_product.h"
#include "tensor/thread_team.h"

namespace echelon {

// Each thread calls this before its first product: otherwise oneDNN would start its own threads.
void keep_products_to_their_thread();
// Call before the first product of all. RunError if there is not enough memory.
void prepare_products();

// Bytes of scratch that a thread needs, aligned to 64: room for ProductScratch.
std::int64_t product_scratch_bytes();

// On the calling thread only. False if memory is exhausted.
bool multiply(const Product& product, std::byte* scratch);

// Several independent products, none of which reads what another writes, by a team, each thread with its own
// scratch. RunError if memory is exhausted.
void multiply(std::span<const Product> products, std::byte* scratch, std::int64_t scratch_per_thread,
              const ThreadTeam& team);

// What computes products of this type on this machine, in words; and this product, on so many threads, whose
// data may be absent.
const char* products_in(DType dtype);
const char* multiplied_by(const Product& product, int threads);

}  // namespace echelon
