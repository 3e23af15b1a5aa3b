#include "tensor/expert_products.h"

#include <algorithm>
#include <optional>

#include "base/error.h"

namespace echelon {

// product(weight, rows): of an expert that has some, and how to take them; nothing where there is none.
template <class Product>
static void multiply_all(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                         const Product& product) {
  check(bounds.size() == weights.size() + 1, "there is a run of rows for each expert");
  std::vector<MatrixProduct> products;
  for (std::size_t e = 0; e < weights.size(); ++e)
    if (bounds[e] < bounds[e + 1])
      if (const std::optional<MatrixProduct> one =
              product(weights[e], [&](const Tensor& x) { return x.row_range(bounds[e], bounds[e + 1]); }))
        products.push_back(*one);
  if (!products.empty()) kernels.grouped_matmul(products);
}

bool any_trained(const std::vector<Weight>& weights) {
  return std::any_of(weights.begin(), weights.end(), [](const Weight& w) { return w.gradient.defined(); });
}

void multiply(Kernels& kernels, const std::vector<Weight>& weights, Transpose turn,
              const ExpertBounds& bounds, const Tensor& x, const Tensor& y) {
  multiply_all(kernels, weights, bounds, [&](const Weight& w, const auto& rows) {
    return std::optional<MatrixProduct>({rows(x), Transpose::no, w.value, turn, rows(y)});
  });
}

void add_gradients(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                   const Tensor& x, const Tensor& dy) {
  multiply_all(kernels, weights, bounds, [&](const Weight& w, const auto& rows) {
    std::optional<MatrixProduct> product;
    if (w.gradient.defined())
      product.emplace(MatrixProduct{rows(dy), Transpose::yes, rows(x), Transpose::no, w.gradient, true});
    return product;
  });
}

}  // namespace echelon
