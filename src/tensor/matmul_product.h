// What a matrix product is made of: matrices in memory, in f32 or bf16, and how they are multiplied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/split.h"
#include "tensor/kernels.h"

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

// The element (row, col) of x, or of op(x).
inline Panel at(const Panel& x, std::int64_t row, std::int64_t col) {
  return {static_cast<std::byte*>(x.data) + (row * x.stride + col) * element_bytes(x.type), x.stride, x.type};
}
inline ConstPanel at(const ConstPanel& x, Transpose turn, std::int64_t row, std::int64_t col) {
  if (turn == Transpose::yes) std::swap(row, col);
  return {static_cast<const std::byte*>(x.data) + (row * x.stride + col) * element_bytes(x.type), x.stride,
          x.type};
}

// Sets all bytes to zero.
inline void clear(const Panel& c, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t i = 0; i < rows; ++i)
    std::memset(at(c, i, 0).data, 0, static_cast<std::size_t>(cols * element_bytes(c.type)));
}

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

// Rows [m.begin, m.end) and columns [n.begin, n.end) of the product.
inline Product part(const Product& p, Range m, Range n) {
  Product q = p;
  q.m = m.size();
  q.n = n.size();
  q.a = at(p.a, p.ta, m.begin, 0);
  q.b = at(p.b, p.tb, 0, n.begin);
  q.c = at(p.c, m.begin, n.begin);
  return q;
}

}  // namespace echelon
