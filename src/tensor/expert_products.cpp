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

void add_gradients(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& weights,
                   const ExpertBounds& of_sequences, const Tensor& x, const Tensor& dy) {
  const std::int64_t sequences = sums.sequences();
  check(std::ssize(of_sequences) == std::ssize(weights) * sequences + 1,
        "there is a run of rows for each expert and sequence");
  std::vector<const Weight*> trained;
  std::vector<std::size_t> experts;
  for (std::size_t e = 0; e < weights.size(); ++e)
    if (weights[e].gradient.defined()) trained.push_back(&weights[e]), experts.push_back(e);
  if (trained.empty()) return;
  sums.add(trained, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
    const auto s = static_cast<std::size_t>(rows.begin / rows.size());
    std::vector<MatrixProduct> products;
    for (std::size_t i = 0; i < experts.size(); ++i) {
      const std::size_t at = experts[i] * static_cast<std::size_t>(sequences) + s;
      const std::int64_t begin = of_sequences[at], end = of_sequences[at + 1];
      if (begin < end)
        products.push_back({dy.row_range(begin, end), Transpose::yes, x.row_range(begin, end), Transpose::no,
                            gradients[i], onto});
      else if (!onto)
        kernels.fill(gradients[i], 0.0);
    }
    if (!products.empty()) kernels.grouped_matmul(products);
  });
}

}  // namespace echelon
