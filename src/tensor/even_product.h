// Products with extents that are not multiples of 16 bytes, such as GPT-2's vocabulary of 50,257. cuBLASLt
// has only its slowest algorithms for these, however rows are aligned: on an H200 they take 7 to 10 times as
// long. They are split into a product of even extents and the few remaining rows, columns or steps of k.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor/kernels.h"

namespace echelon {

inline constexpr std::int64_t even_elements = 8;  // of bf16

// Whether splitting is worth its launches; it helps only if rows are aligned.
inline bool is_cut_evenly(const MatrixProduct& p) {
  constexpr std::int64_t long_extent = 2048, much_work = std::int64_t{1} << 28;
  const std::int64_t m = p.c.rows(), n = p.c.cols(), k = p.ta == Transpose::yes ? p.a.rows() : p.a.cols();
  const auto is_odd = [](std::int64_t extent) {
    return extent >= long_extent && extent % even_elements != 0;
  };
  const auto is_aligned = [](const Tensor& t) { return t.row_stride() % even_elements == 0; };
  return p.a.dtype() == DType::bf16 && p.b.dtype() == DType::bf16 && p.blocks.empty() &&
         (is_odd(m) || is_odd(n) || is_odd(k)) && m * n * k >= much_work && is_aligned(p.a) &&
         is_aligned(p.b) && is_aligned(p.c);
}

// The parts of a bf16 product, with each element of the result rounded once. multiply(product) computes one
// part. `room` (bytes) holds sums in f32 for a bf16 result, a few rows at a time; copy(sums, result) rounds
// them.
template <class Multiply, class Copy>
class EvenProduct {
 public:
  EvenProduct(const Tensor& room, const Multiply& multiply, const Copy& copy)
      : room_(room), multiply_(multiply), copy_(copy) {}

  void run(const MatrixProduct& p) const {
    const std::int64_t m = p.c.rows(), n = p.c.cols();
    if (is_odd(n)) return run(columns(p, 0, even(n))), multiply_(columns(p, even(n), n));
    if (is_odd(m) && p.ta == Transpose::yes) return run(rows(p, 0, even(m))), multiply_(rows(p, even(m), m));
    const bool lies_along_k = p.ta == Transpose::no || p.tb == Transpose::yes;
    if (!lies_along_k || !is_odd(depth(p))) return multiply_(p);
    if (p.c.dtype() == DType::f32) return add_steps(p);
    const std::int64_t at_once = room_.bytes() / (n * element_bytes(DType::f32));
    if (p.accumulate || at_once == 0) return multiply_(p);
    for (std::int64_t begin = 0; begin < m; begin += at_once) {
      MatrixProduct part = rows(p, begin, std::min(begin + at_once, m));
      const Tensor result = part.c;
      part.c = room_.typed(0, DType::f32, {result.rows(), n});
      add_steps(part);
      copy_(part.c, result);
    }
  }

 private:
  static bool is_odd(std::int64_t extent) { return extent > even_elements && extent % even_elements != 0; }
  static std::int64_t even(std::int64_t extent) { return extent / even_elements * even_elements; }
  static std::int64_t depth(const MatrixProduct& p) {
    return p.ta == Transpose::yes ? p.a.rows() : p.a.cols();
  }
  static MatrixProduct columns(const MatrixProduct& p, std::int64_t begin, std::int64_t end) {
    MatrixProduct part = p;
    part.b = p.tb == Transpose::yes ? p.b.row_range(begin, end) : p.b.column_range(begin, end);
    part.c = p.c.column_range(begin, end);
    return part;
  }
  static MatrixProduct rows(const MatrixProduct& p, std::int64_t begin, std::int64_t end) {
    MatrixProduct part = p;
    part.a = p.ta == Transpose::yes ? p.a.column_range(begin, end) : p.a.row_range(begin, end);
    part.c = p.c.row_range(begin, end);
    return part;
  }
  static MatrixProduct steps(const MatrixProduct& p, std::int64_t begin, std::int64_t end) {
    MatrixProduct part = p;
    part.a = p.ta == Transpose::yes ? p.a.row_range(begin, end) : p.a.column_range(begin, end);
    part.b = p.tb == Transpose::yes ? p.b.column_range(begin, end) : p.b.row_range(begin, end);
    return part;
  }
  // For a result in f32.
  void add_steps(const MatrixProduct& p) const {
    const std::int64_t k = depth(p);
    multiply_(steps(p, 0, even(k)));
    MatrixProduct rest = steps(p, even(k), k);
    rest.accumulate = true;
    multiply_(rest);
  }

  const Tensor& room_;
  const Multiply& multiply_;
  const Copy& copy_;
};

}  // namespace echelon
