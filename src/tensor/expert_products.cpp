#include "tensor/expert_products.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "tensor/layer_products.h"

namespace echelon {

// Calls product(weight, rows) for each expert with rows, where rows(x) takes the expert's rows of x. It may
// return no product.
template <class Product>
static std::vector<MatrixProduct> products_of(const std::vector<Weight>& weights, const ExpertBounds& bounds,
                                              const Product& product) {
  check(bounds.size() == weights.size() + 1, "there is a run of rows for each expert");
  std::vector<MatrixProduct> products;
  for (std::size_t e = 0; e < weights.size(); ++e)
    if (bounds[e] < bounds[e + 1])
      if (const std::optional<MatrixProduct> one =
              product(weights[e], [&](const Tensor& x) { return x.row_range(bounds[e], bounds[e + 1]); }))
        products.push_back(*one);
  return products;
}

template <class Product>
static void multiply_all(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                         const Product& product) {
  const std::vector<MatrixProduct> products = products_of(weights, bounds, product);
  if (!products.empty()) kernels.grouped_matmul(products);
}

// Products of layers. In fp8, rooms are reserved for the operands of all experts (`all_a`, and `all_b` if
// they are rows of one tensor, else the weights), however tokens are routed, so that memory is known
// beforehand.
template <class Product>
static void multiply_all(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                         const OperandFormats& formats, const Tensor& all_a, const Tensor& all_b,
                         const Product& product) {
  if (!formats.in_fp8) return multiply_all(kernels, weights, bounds, product);
  std::vector<Tensor> of_weights;
  if (!all_b.defined())
    for (const Weight& w : weights) of_weights.push_back(fp8_room(w.value));
  const Tensor room_a = fp8_room(all_a), room_b = all_b.defined() ? fp8_room(all_b) : Tensor();
  std::vector<Fp8Product> rounded;
  for (std::size_t e = 0; e < weights.size(); ++e) {
    const auto rows = [&](const Tensor& x) { return x.row_range(bounds[e], bounds[e + 1]); };
    for (MatrixProduct& one : products_of({weights[e]}, {bounds[e], bounds[e + 1]}, product))
      rounded.push_back(
          {std::move(one), formats, rows(room_a), all_b.defined() ? rows(room_b) : of_weights[e]});
  }
  if (!rounded.empty()) kernels.fp8_matmul(rounded);
}

bool any_trained(const std::vector<Weight>& weights) {
  return std::any_of(weights.begin(), weights.end(), [](const Weight& w) { return w.gradient.defined(); });
}

void multiply(Kernels& kernels, const std::vector<Weight>& weights, Transpose turn,
              const ExpertBounds& bounds, const Tensor& x, const Tensor& y, const SumBlocks& sums,
              const OperandFormats& formats) {
  multiply_all(kernels, weights, bounds, formats, x, {}, [&](const Weight& w, const auto& rows) {
    return std::optional<MatrixProduct>({rows(x), Transpose::no, w.value, turn, rows(y), false, sums});
  });
}

void add_gradients(Kernels& kernels, const std::vector<Weight>& weights, const ExpertBounds& bounds,
                   const Tensor& x, const Tensor& dy, const OperandFormats& formats) {
  multiply_all(kernels, weights, bounds, formats, dy, x, [&](const Weight& w, const auto& rows) {
    std::optional<MatrixProduct> product;
    if (w.gradient.defined())
      product.emplace(MatrixProduct{rows(dy), Transpose::yes, rows(x), Transpose::no, w.gradient, true});
    return product;
  });
}

void add_biases(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                const Tensor& y) {
  for (std::size_t e = 0; e < biases.size(); ++e)
    if (bounds[e] < bounds[e + 1])
      kernels.add_bias(biases[e].value, y.row_range(bounds[e], bounds[e + 1]));
}

void add_bias_gradients(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                        const Tensor& dy) {
  for (std::size_t e = 0; e < biases.size(); ++e)
    if (biases[e].gradient.defined() && bounds[e] < bounds[e + 1])
      kernels.bias_gradient(dy.row_range(bounds[e], bounds[e + 1]), biases[e].gradient);
}

void add_bias_products(Kernels& kernels, const std::vector<Weight>& biases, const ExpertBounds& bounds,
                       const Tensor& x, const Tensor& of_rows) {
  multiply_all(kernels, biases, bounds, [&](const Weight& bias, const auto& rows) {
    return std::optional<MatrixProduct>(
        {rows(x), Transpose::no, bias.value, Transpose::yes, rows(of_rows), true});
  });
}

// For each sequence, calls add_one(index of an expert's run, gradient, whether to add) for experts with rows
// of it; the gradients of others get zeros from it. Then calls end().
template <class AddOne, class End>
static void add_by_sequence(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& weights,
                            const ExpertBounds& of_sequences, const AddOne& add_one, const End& end) {
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
    for (std::size_t i = 0; i < experts.size(); ++i) {
      const std::size_t at = experts[i] * static_cast<std::size_t>(sequences) + s;
      const Range run{of_sequences[at], of_sequences[at + 1]};
      if (run.size() > 0)
        add_one(run, gradients[i], onto);
      else if (!onto)
        kernels.fill(gradients[i], 0.0);
    }
    end();
  });
}

void add_gradients(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& weights,
                   const ExpertBounds& of_sequences, const Tensor& x, const Tensor& dy) {
  std::vector<MatrixProduct> products;
  add_by_sequence(
      kernels, sums, weights, of_sequences,
      [&](Range run, const Tensor& gradient, bool onto) {
        products.push_back({dy.row_range(run.begin, run.end), Transpose::yes,
                            x.row_range(run.begin, run.end), Transpose::no, gradient, onto});
      },
      [&] {
        if (!products.empty()) kernels.grouped_matmul(products);
        products.clear();
      });
}

void add_bias_gradients(Kernels& kernels, const SequenceSums& sums, const std::vector<Weight>& biases,
                        const ExpertBounds& of_sequences, const Tensor& dy) {
  add_by_sequence(
      kernels, sums, biases, of_sequences,
      [&](Range run, const Tensor& gradient, bool onto) {
        if (!onto) kernels.fill(gradient, 0.0);
        kernels.bias_gradient(dy.row_range(run.begin, run.end), gradient);
      },
      [] {});
}

}  // namespace echelon
