// Matrix products in the convention of libraries with column-major storage.
#pragma once

#include <cstdint>
#include <optional>

#include "tensor/kernels.h"

namespace echelon {

// `cols` columns of `rows` elements, `stride` elements apart: the transpose of the row-major tensor.
struct ColumnMatrix {
  const Tensor* tensor;
  std::int64_t rows, cols, stride;
  bool transposed;  // before the multiplication
};

// result = or += op(first) op(second).
struct ColumnProduct {
  ColumnMatrix first, second, result;
};

// A row-major c = op(a) op(b) is a column-major c^T = op(b)^T op(a)^T. `product` outlives the result.
inline ColumnProduct column_product(const MatrixProduct& product) {
  const auto of = [](const Tensor& t, Transpose turn) {
    return ColumnMatrix{&t, t.cols(), t.rows(), t.row_stride(), turn == Transpose::yes};
  };
  return {of(product.b, product.tb), of(product.a, product.ta), of(product.c, Transpose::no)};
}

// What such libraries can do in the same pass. `vector` has an element for each row of the result, or for
// each column of sums_of_second; `beside` is shaped like the result.
struct ColumnEpilogue {
  enum class Kind {
    none,
    bias,            // each column += vector
    gelu,            // beside = the product, and the result GELU of it (its tanh form)
    bias_gelu,       // the same, with the bias first
    gelu_slope,      // the result = the product times the slope of GELU at `beside`
    sums_of_first,   // vector = the sums over k of op(first)
    sums_of_second,  // vector = the sums over k of op(second)
  };
  Kind kind = Kind::none;
  const Tensor *vector = nullptr, *beside = nullptr;
};
// cuBLASLt approximates the tanh of GELU and of its slope: on an H200 gradients in f32 were off by 1.4e-5 of
// their size. A bf16 result (2^-9 at best) does not show it; for wider results our own passes follow the
// product instead.
inline bool is_exact_enough(ColumnEpilogue::Kind kind, DType result) {
  using Kind = ColumnEpilogue::Kind;
  const bool takes_tanh = kind == Kind::gelu || kind == Kind::bias_gelu || kind == Kind::gelu_slope;
  return !takes_tanh || result == DType::bf16;
}

struct FollowedProduct {
  ColumnProduct product;
  ColumnEpilogue epilogue;
  // A matrix that the product is added to: none, the result, or another one.
  std::optional<ColumnMatrix> onto = {};
};

// The library's product and epilogue; empty if it has none for these. Both arguments outlive the result. Left
// to the caller: `hidden` must still become its activation, and column sums are written, not added.
inline std::optional<FollowedProduct> followed_product(const MatrixProduct& product, const Epilogue& e) {
  using Kind = ColumnEpilogue::Kind;
  FollowedProduct made{column_product(product), {}};
  if (product.accumulate) made.onto = made.product.result;
  if (e.added.defined()) {
    made.onto = made.product.result;
    made.onto->tensor = &e.added;
    made.onto->stride = e.added.row_stride();
  }
  const bool activates = e.activated.defined() || e.hidden.defined();
  if (activates && e.activation != Activation::gelu) return {};
  if (e.column_sums.defined() ? activates || e.bias.defined() || e.added.defined()
                              : e.hidden.defined() && e.bias.defined())
    return {};
  if (e.column_sums.defined()) {
    made.epilogue = {e.sums_of_b ? Kind::sums_of_first : Kind::sums_of_second, &e.column_sums};
  } else if (e.activated.defined()) {
    made.epilogue = {e.bias.defined() ? Kind::bias_gelu : Kind::gelu, e.bias.defined() ? &e.bias : nullptr,
                     &product.c};
    ColumnMatrix& result = made.product.result;
    result.tensor = &e.activated;
    result.stride = e.activated.row_stride();
  } else if (e.hidden.defined()) {
    made.epilogue = {Kind::gelu_slope, nullptr, &e.hidden};
  } else if (e.bias.defined()) {
    made.epilogue = {Kind::bias, &e.bias};
  }
  return made;
}

}  // namespace echelon
