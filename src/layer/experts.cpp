#include "layer/experts.h"

#include "base/error.h"

namespace echelon {
namespace {

Tensor rows_of(const Tensor& x, const ExpertMlps::Bounds& bounds, std::size_t e) {
  return x.row_range(bounds[e], bounds[e + 1]);
}

// y = x W or x W^T, expert by expert.
void multiply(Kernels& kernels, const std::vector<Weight>& weights, Transpose turn,
              const ExpertMlps::Bounds& bounds, const Tensor& x, const Tensor& y) {
  check(bounds.size() == weights.size() + 1, "there is a run of rows for each expert");
  std::vector<MatrixProduct> products;
  for (std::size_t e = 0; e < weights.size(); ++e)
    if (bounds[e] < bounds[e + 1])
      products.push_back(
          {rows_of(x, bounds, e), Transpose::no, weights[e].value, turn, rows_of(y, bounds, e)});
  kernels.grouped_matmul(products);
}

// Gradients += dy^T x. Those of an expert without tokens stay as they are.
void add_gradients(Kernels& kernels, const std::vector<Weight>& weights, const ExpertMlps::Bounds& bounds,
                   const Tensor& x, const Tensor& dy) {
  check(bounds.size() == weights.size() + 1, "there is a run of rows for each expert");
  std::vector<MatrixProduct> products;
  for (std::size_t e = 0; e < weights.size(); ++e)
    if (bounds[e] < bounds[e + 1])
      products.push_back({rows_of(dy, bounds, e), Transpose::yes, rows_of(x, bounds, e), Transpose::no,
                          weights[e].gradient, true});
  kernels.grouped_matmul(products);
}

Tensor used(const Tensor& x, const ExpertMlps::Bounds& bounds) { return x.row_range(0, bounds.back()); }

}  // namespace

void ExpertMlps::in_forward(Kernels& kernels, const Bounds& bounds, const Tensor& x,
                            const Tensor& hidden) const {
  multiply(kernels, in_, Transpose::yes, bounds, x, hidden);
}

void ExpertMlps::activate(Kernels& kernels, const Bounds& bounds, const Tensor& hidden,
                          const Tensor& activated) const {
  kernels.swiglu(used(hidden, bounds), used(activated, bounds));
}

void ExpertMlps::out_forward(Kernels& kernels, const Bounds& bounds, const Tensor& activated,
                             const Tensor& y) const {
  multiply(kernels, out_, Transpose::yes, bounds, activated, y);
}

void ExpertMlps::out_backward_input(Kernels& kernels, const Bounds& bounds, const Tensor& dy,
                                    const Tensor& d_activated) const {
  multiply(kernels, out_, Transpose::no, bounds, dy, d_activated);
}

void ExpertMlps::activate_backward(Kernels& kernels, const Bounds& bounds, const Tensor& hidden,
                                   const Tensor& d_activated, const Tensor& weights,
                                   const Tensor& d_weights) const {
  kernels.weighted_swiglu_backward(used(hidden, bounds), used(d_activated, bounds), used(weights, bounds),
                                   used(d_weights, bounds));
}

void ExpertMlps::out_backward_weight(Kernels& kernels, const Bounds& bounds, const Tensor& activated,
                                     const Tensor& dy) const {
  add_gradients(kernels, out_, bounds, activated, dy);
}

void ExpertMlps::in_backward_input(Kernels& kernels, const Bounds& bounds, const Tensor& d_hidden,
                                   const Tensor& dx) const {
  multiply(kernels, in_, Transpose::no, bounds, d_hidden, dx);
}

void ExpertMlps::in_backward_weight(Kernels& kernels, const Bounds& bounds, const Tensor& x,
                                    const Tensor& d_hidden) const {
  add_gradients(kernels, in_, bounds, x, d_hidden);
}

}  // namespace echelon
