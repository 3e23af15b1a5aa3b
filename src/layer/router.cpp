#include "layer/router.h"

#include <algorithm>

#include "base/error.h"
#include "tensor/reference_view.h"

namespace echelon {
namespace {

template <class F>
void read_row(const Matrix<F>& m, std::int64_t i, std::vector<double>& row) {
  row.assign(m[i], m[i] + m.cols);
}

std::span<const double> factors_of(const RouterLosses& losses, std::int64_t row, std::int64_t experts) {
  if (losses.factors.empty()) return {};
  const std::int64_t scope = (losses.first_row + row) / losses.rows_per_scope;
  check((scope + 1) * experts <= std::ssize(losses.factors), "balance factors are there for every scope");
  return {losses.factors.data() + scope * experts, static_cast<std::size_t>(experts)};
}

}  // namespace

// body(row, ids, weights) fills the weights of each token's experts, and its ids where they are chosen here.
template <class Body>
void Router::each_token(const Tensor& logits, const Tensor& ids, const Tensor& weights,
                        const Body& body) const {
  const auto k = static_cast<std::size_t>(experts_per_token());
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits);
    std::int32_t* id = flat<std::int32_t>(ids, in.rows * experts_per_token());
    F* weight = flat<F>(weights, in.rows * experts_per_token());
    TokenRouter::Row row;
    std::vector<double> values, chosen(k);
    for (std::int64_t i = 0; i < in.rows; ++i, id += k, weight += k) {
      read_row(in, i, values);
      token_.score(values, row);
      body(row, std::span(id, k), chosen);
      for (std::size_t j = 0; j < k; ++j) weight[j] = static_cast<F>(chosen[j]);
    }
  });
}

void Router::choose(const Tensor& logits, std::span<const double> bias, const Tensor& ids,
                    const Tensor& weights) const {
  check(logits.cols() == num_experts() && (bias.empty() || std::ssize(bias) == num_experts()),
        "a router's logits and bias have a place for each expert");
  each_token(logits, ids, weights,
             [&](TokenRouter::Row& row, std::span<std::int32_t> its, std::vector<double>& chosen) {
               token_.choose(row, bias, its, chosen);
             });
}

void Router::weigh(const Tensor& logits, const Tensor& ids, const Tensor& weights) const {
  each_token(logits, ids, weights,
             [&](TokenRouter::Row& row, std::span<std::int32_t> its, std::vector<double>& chosen) {
               token_.weigh(row, its, chosen);
             });
}

double Router::loss(const Tensor& logits, const RouterLosses& losses) const {
  double total = 0;
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits);
    TokenRouter::Row row;
    std::vector<double> values;
    for (std::int64_t i = 0; i < in.rows; ++i) {
      read_row(in, i, values);
      token_.score(values, row);
      total += token_.loss(row, factors_of(losses, i, num_experts()), losses.z_loss);
    }
  });
  return total;
}

void Router::backward(const Tensor& logits, const Tensor& ids, const Tensor& d_weights,
                      const RouterLosses& losses, double loss_scale, const Tensor& d_logits) const {
  const auto k = static_cast<std::size_t>(experts_per_token());
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits), out(d_logits);
    check_same(in, out, "router: shapes of the logits and of their gradient differ");
    const std::int32_t* id = flat<std::int32_t>(ids, in.rows * experts_per_token());
    const F* d_weight = flat<F>(d_weights, in.rows * experts_per_token());
    TokenRouter::Row row;
    std::vector<double> values, d_chosen(k), d_values(static_cast<std::size_t>(num_experts()));
    for (std::int64_t i = 0; i < in.rows; ++i, id += k, d_weight += k) {
      read_row(in, i, values);
      token_.score(values, row);
      std::copy_n(d_weight, k, d_chosen.begin());
      token_.backward(row, {id, k}, d_chosen, factors_of(losses, i, num_experts()), losses.z_loss, loss_scale,
                      d_values);
      std::transform(d_values.begin(), d_values.end(), out[i], [](double d) { return static_cast<F>(d); });
    }
  });
}

}  // namespace echelon
