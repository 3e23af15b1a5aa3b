// Products as libraries see them whose matrices are stored column after column.
#pragma once

#include <cstdint>

#include "tensor/kernels.h"

namespace echelon {

// `cols` columns of `rows` elements, `stride` elements apart. Of a tensor it is the transpose of the matrix
// that the tensor is.
struct ColumnMatrix {
  const Tensor* tensor;
  std::int64_t rows, cols, stride;
  bool transposed;  // before it is multiplied
};

// result = or += op(first) op(second).
struct ColumnProduct {
  ColumnMatrix first, second, result;
};

// c = op(a) op(b), rows after rows, is c^T = op(b)^T op(a)^T. `product` outlives what is returned.
inline ColumnProduct column_product(const MatrixProduct& product) {
  const auto of = [](const Tensor& t, Transpose turn) {
    return ColumnMatrix{&t, t.cols(), t.rows(), t.row_stride(), turn == Transpose::yes};
  };
  return {of(product.b, product.tb), of(product.a, product.ta), of(product.c, Transpose::no)};
}

}  // namespace echelon
