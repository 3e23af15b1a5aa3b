// Matrix products in f32 and bf16. Each element is one sum in the order of k, cut at places that depend on k
// alone: its bits do not depend on how a product is cut, by threads or by who asks for it. In f32 with
// AVX-512 oneDNN makes the products at which it is faster. Both give the same bits, and they do not depend on
// threads here; but in oneDNN a product of few rows or columns may have others than as a part of a larger
// one, so invariant numerics do not use it. The blocks and the packing are those of Goto & van de Geijn 2008
// (https://doi.org/10.1145/1356052.1356053).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/kernels.h"
#include "tensor/thread_team.h"

namespace echelon {

// A row-major matrix, f32 or bf16, whose rows stand `stride` elements apart.
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
  // How k is summed, by our own kernels; outlives this. null: as one sum, by whichever kernel is fastest.
  const SumBlocks* blocks = nullptr;
};

void clear(const Panel& c, std::int64_t rows, std::int64_t cols);  // all bytes zero
// Where x, or op(x), begins at (row, col).
Panel at(const Panel& x, std::int64_t row, std::int64_t col);
ConstPanel at(const ConstPanel& x, Transpose turn, std::int64_t row, std::int64_t col);

// What a thread calls before its first product: oneDNN would start threads of its own.
void keep_products_to_their_thread();
// Before the first product of all: RunError where there is no memory for it.
void prepare_products();

// Room that a thread needs, at an address that 64 divides.
std::int64_t product_scratch_bytes();

// On the calling thread alone. False when there is no memory left.
bool multiply(const Product& product, std::byte* scratch);

// The same by a kernel of one's choice, which must be for what the operands are.
struct MicroKernel;
void multiply_by(const MicroKernel& kernel, const Product& product, std::byte* scratch);
void multiply_by_blocks(const MicroKernel& kernel, const Product& product, std::byte* scratch);
// By a team whose threads make it together, each with scratch of its own. k is not 0, and there are no
// blocks.
void multiply_together(const MicroKernel& kernel, const Product& product, std::byte* scratch,
                       std::int64_t scratch_per_thread, const ThreadTeam& team);

// All of them, none of which reads what another writes, by a team, each thread with scratch of
// its own. RunError when there is no memory left.
void multiply(std::span<const Product> products, std::byte* scratch, std::int64_t scratch_per_thread,
              const ThreadTeam& team);

// What multiplies it here, in words.
const char* products_in(DType dtype);

}  // namespace echelon
