// Matrix products in f32 and bf16 by oneDNN (2.6 or later). Nothing else in the library knows of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/kernels.h"

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
};

// Whether this processor multiplies bf16 by itself. Where it does not, bf16 is widened piece by piece.
bool multiplies_bf16();

// Room that a thread needs for products in bf16, at an address that 64 divides; those of f32 alone need none.
std::int64_t product_scratch_bytes();

// Before the first product, where OpenMP's thread count is 1. oneDNN writes its code when it is first called,
// without a look at whether it got the memory, so this is done while there is some. RunError where there is
// not.
void prepare_products();

// On the calling thread alone, provided that it is inside an OpenMP region of several threads or its own
// OpenMP thread count is 1. False when oneDNN fails (no memory left): an exception may not leave an OpenMP
// region.
bool multiply(const Product& product, std::byte* scratch);

// All of them, none of which reads what another writes, on `threads` threads with as many times
// product_scratch_bytes() of scratch: each has the bits that it has alone, whatever the number of threads.
// Throws RunError when oneDNN fails.
void multiply(std::span<const Product> products, std::byte* scratch, int threads);

}  // namespace echelon
