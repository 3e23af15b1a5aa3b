// Typed rows of tensors for the reference kernels, checked once per call.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "tensor/rows/team.h"
#include "tensor/tensor.h"

namespace echelon {

// A tensor as a matrix (leading dimensions folded into rows), m[row][column]; rows may have a stride.
// InvariantError if the tensor is undefined or its elements are not F.
template <class F>
struct Matrix : rows::Matrix<F> {
  explicit Matrix(const Tensor& t) : rows::Matrix<F>{t.host<F>(), t.rows(), t.cols(), t.row_stride()} {
    check(t.defined() || t.numel() == 0, "kernel called with an undefined tensor");
  }
};

template <class F>
void check_same(const Matrix<F>& x, const Matrix<F>& y, const char* what) {
  check(x.rows == y.rows && x.cols == y.cols, what);
}

// The `count` elements of a contiguous tensor of any shape.
template <class T>
T* flat(const Tensor& t, std::int64_t count) {
  check(t.defined() || t.numel() == 0, "kernel called with an undefined tensor");
  check(t.contiguous() && t.numel() == count, "kernel called with a vector of the wrong length");
  return t.host<T>();
}

// Calls body(float{}) or body(double{}) by the tensor's dtype, for tensors that are never narrower.
template <class Body>
void with_float_type(const Tensor& t, const Body& body) {
  if (t.dtype() == DType::f32) return body(float{});
  if (t.dtype() == DType::f64) return body(double{});
  throw InvariantError(std::string("internal error: f32 or f64 belongs where a kernel is called with ") +
                       dtype_name(t.dtype()));
}

// The same, and body(bf16{}).
template <class Body>
void with_stored_type(const Tensor& t, const Body& body) {
  if (t.dtype() == DType::bf16) return body(bf16{});
  with_float_type(t, body);
}

}  // namespace echelon
