// Matrix products in f32 and bf16. Each element is one sum in the order of k, cut at places that depend on k
// alone: its bits do not depend on how a product is cut, by threads or by the caller. With AMX, f32 products
// are made by parts (tensor/three_parts.h) unless they are small. Other f32 products are oneDNN's with
// AVX-512, or our kernel's if it is faster and alpha is 1. Both give the same bits, which do not depend on
// threads here; but in oneDNN a product of few rows or columns, or with another alpha, may have other bits
// than as part of a larger one, and so has one that is too small for parts: invariant numerics use one kernel
// of ours for all. Blocking and packing follow Goto & van de Geijn 2008
// (https://doi.org/10.1145/1356052.1356053).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/kernels.h"
#include "tensor/thread_team.h"

namespace echelon {

// A row-major matrix, f32 or bf16, whose rows are `stride` elements apart.
struct ConstPanel {
  const void* data = nullptr;
  std::int64_t stride = 0;
  DType type = DType::f32;
};
struct Panel {
  void* data = nullptr;
  std::int64_t stride = 0;
  DType type = DType::f32;
};

// c = alpha op(a) op(b) + beta c, beta 0 or 1. op(a) is (m, k), op(b) is (k, n), c is (m, n). Sums are f32.
struct Product {
  Transpose ta = Transpose::no, tb = Transpose::no;
  std::int64_t m = 0, n = 0, k = 0;
  float alpha = 1;
  ConstPanel a, b;
  float beta = 0;
  Panel c;
  // How our own kernels group the sum over k; must outlive this. null: one sum, by the fastest kernel.
  const SumBlocks* blocks = nullptr;
};

void clear(const Panel& c, std::int64_t rows, std::int64_t cols);  // sets all bytes to zero
// The element (row, col) of x, or of op(x).
Panel at(const Panel& x, std::int64_t row, std::int64_t col);
ConstPanel at(const ConstPanel& x, Transpose turn, std::int64_t row, std::int64_t col);

// Each thread calls this before its first product: otherwise oneDNN would start its own threads.
void keep_products_to_their_thread();
// Call before the first product of all. RunError if there is not enough memory.
void prepare_products();

// Bytes of scratch that a thread needs, aligned to 64.
std::int64_t product_scratch_bytes();

// On the calling thread only. False if memory is exhausted.
bool multiply(const Product& product, std::byte* scratch);

// The same by a given kernel, which must support the operands' types.
struct MicroKernel;
void multiply_by(const MicroKernel& kernel, const Product& product, std::byte* scratch);
void multiply_by_blocks(const MicroKernel& kernel, const Product& product, std::byte* scratch);
// By a team whose threads compute it together, each with its own scratch. k > 0, and no blocks.
void multiply_together(const MicroKernel& kernel, const Product& product, std::byte* scratch,
                       std::int64_t scratch_per_thread, const ThreadTeam& team);

// Several independent products, none of which reads what another writes, by a team, each thread with its own
// scratch. RunError if memory is exhausted.
void multiply(std::span<const Product> products, std::byte* scratch, std::int64_t scratch_per_thread,
              const ThreadTeam& team);

// What computes products of this type on this machine, in words; and this product, on so many threads, whose
// data may be absent.
const char* products_in(DType dtype);
const char* multiplied_by(const Product& product, int threads);

}  // namespace echelon
