#include "tensor/expert_products.h"

#include "base/error.h"

namespace echelon {

// product(weight, rows): of an expert that has some, and how to take them.
template <class Product>
static void multiply_all(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                         const Product& product) {
  check(bounds.size() == weights.size() + 1, "there is a run of rows for each expert");
  std::vector<MatrixProduct> products;
  for (std::size_t e = 0; e < weights.size(); ++e)
    if (bounds[e] < bounds[e + 1])
      products.push_back(
          product(weights[e], [&](const Tensor& x) { return x.row_range(bounds[e], bounds[e + 1]); }));
  kernels.grouped_matmul(products);
}

void multiply(Kernels& kernels, const std::vector<Weight>& weights, Transpose turn,
              const ExpertBounds& bounds, const Tensor& x, const Tensor& y) {
  multiply_all(kernels, weights, bounds, [&](const Weight& w, const auto& rows) -> MatrixProduct {
    return {rows(x), Transpose::no, w.value, turn, rows(y)};
  });
}

void add_gradients(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                   const Tensor& x, const Tensor& dy) {
  multiply_all(kernels, weights, bounds, [&](const Weight& w, const auto& rows) -> MatrixProduct {
    return {rows(dy), Transpose::yes, rows(x), Transpose::no, w.gradient, true};
  });
}

}  // namespace echelon
