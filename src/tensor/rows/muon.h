// The passes of Muon (Jordan et al. 2024) over single elements: momentum, and the step of the weights.
#pragma once

#include "tensor/rows/adamw.h"

namespace echelon::rows {

// Nesterov's momentum: what is orthogonalized looks one step ahead of the mean.
template <class M, class T>
struct Momentum {
  using F = Wide<M>;
  static constexpr int columns = columns_of<F>;
  const F* gradient;
  M* m;
  T* update;
  F momentum, scale;
  bool is_aligned() const { return are_aligned<columns>(gradient, m, update); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t, Columns<N> at) const {
    const auto gradients = at.read(gradient);
    const auto means = at.read(m);
    F mean[N], ahead[N];
    for (int k = 0; k < N; ++k) {
      const F g = scale * gradients[k];
      mean[k] = momentum * means[k] + g;
      ahead[k] = momentum * mean[k] + g;
    }
    at.write(m, [&](int k) { return mean[k]; });
    at.write(update, [&](int k) { return ahead[k]; });
  }
};

template <class Weights, class F, class T>
struct StepWeights {
  static constexpr int columns = columns_of<F>;
  Weights weights;
  const T* update;
  F keep, rate;
  bool is_aligned() const {
    return weights.template are_aligned<columns>() && rows::is_aligned<columns>(update);
  }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t, Columns<N> at) const {
    F weight[N];
    weights.read(at, weight);
    const auto updates = at.read(update);
    for (int k = 0; k < N; ++k) weight[k] = keep * weight[k] - rate * F(updates[k]);
    weights.write(at, [&](int k) { return weight[k]; });
  }
};

}  // namespace echelon::rows
