// f32 matrix products by oneDNN (2.6 or later). Nothing else in the library knows of it.
#pragma once

#include <cstdint>
#include <span>

#include "tensor/kernels.h"

namespace echelon {

// c = alpha op(a) op(b) + beta c, beta 0 or 1. Row-major; op(a) is (m, k), op(b) is (k, n), c is (m, n); rows
// stand a_stride, b_stride and c_stride floats apart.
struct Product {
  Transpose ta = Transpose::no, tb = Transpose::no;
  std::int64_t m = 0, n = 0, k = 0;
  float alpha = 1;
  const float* a = nullptr;
  std::int64_t a_stride = 0;
  const float* b = nullptr;
  std::int64_t b_stride = 0;
  float beta = 0;
  float* c = nullptr;
  std::int64_t c_stride = 0;
};

// Before the first product, where OpenMP's thread count is 1. oneDNN writes its code when it is first called,
// without a look at whether it got the memory, so this is done while there is some. RunError where there is
// not.
void prepare_products();

// On the calling thread alone, provided that it is inside an OpenMP region of several threads or its own
// OpenMP thread count is 1. False when oneDNN fails (no memory left): an exception may not leave an OpenMP
// region.
bool multiply(const Product& product);

// On `threads` threads; the same bits for any number of them. Throws RunError when oneDNN fails.
void multiply(const Product& product, int threads);

// All of them, none of which reads what another writes, with the bits that each has alone.
void multiply(std::span<const Product> products, int threads);

}  // namespace echelon
