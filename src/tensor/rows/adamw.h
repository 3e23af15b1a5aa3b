// AdamW (Loshchilov & Hutter 2019) for weights in each form of storage.
#pragma once

#include <cmath>
#include <type_traits>

#include "base/bf16.h"
#include "base/philox_words.h"
#include "base/split_weight.h"
#include "tensor/rows/columns.h"

namespace echelon::rows {

// Forms of storage: unchanged; as values and remainders; or only in bf16, rounded at random with a word of
// the logical element. For several neighbouring weights, read() gives them widened, and write() stores
// weight(k) for each.
template <class F>
struct WholeWeights {
  F* weights;
  template <int N>
  bool are_aligned() const {
    return is_aligned<N>(weights);
  }
  template <int N>
  ECHELON_HOST_DEVICE void read(Columns<N> at, F (&to)[N]) const {
    const auto from = at.read(weights);
    for (int k = 0; k < N; ++k) to[k] = from[k];
  }
  template <int N, class Weight>
  ECHELON_HOST_DEVICE void write(Columns<N> at, const Weight& weight) const {
    at.write(weights, weight);
  }
};
struct SplitWeights {
  bf16* values;
  std::int16_t* remainders;
  template <int N>
  bool are_aligned() const {
    return rows::are_aligned<N>(values, remainders);
  }
  template <int N>
  ECHELON_HOST_DEVICE void read(Columns<N> at, float (&to)[N]) const {
    const auto value = at.read(values);
    const auto remainder = at.read(remainders);
    for (int k = 0; k < N; ++k) to[k] = SplitWeight(bf16(value[k]), remainder[k]).joined();
  }
  template <int N, class Weight>
  ECHELON_HOST_DEVICE void write(Columns<N> at, const Weight& weight) const {
    SplitWeight split[N];
    for (int k = 0; k < N; ++k) split[k] = SplitWeight(weight(k));
    at.write(values, [&](int k) { return split[k].value; });
    at.write(remainders, [&](int k) { return split[k].remainder; });
  }
};
// Element `first` and those after it are logical elements from `logical` on.
struct PlacedRun {
  std::int64_t first, logical;
};
struct WeightsRoundedAtRandom {
  bf16* weights;
  PhiloxKey key;
  const PlacedRun* runs;  // sorted by `first`; the first is 0
  std::int64_t num_runs;
  template <int N>
  bool are_aligned() const {
    return is_aligned<N>(weights);
  }
  template <int N>
  ECHELON_HOST_DEVICE void read(Columns<N> at, float (&to)[N]) const {
    const auto from = at.read(weights);
    for (int k = 0; k < N; ++k) to[k] = from[k];
  }
  template <int N, class Weight>
  ECHELON_HOST_DEVICE void write(Columns<N> at, const Weight& weight) const {
    at.write(weights, [&](int k) {
      return bf16::stochastic(weight(k), static_cast<std::uint16_t>(word(at.begin + k) >> 16));
    });
  }
  // The upper half is for the weight, the lower half for the mean of squares.
  ECHELON_HOST_DEVICE std::uint32_t word(std::int64_t i) const { return philox_word(key, logical(i)); }
  ECHELON_HOST_DEVICE std::uint64_t logical(std::int64_t i) const {
    const PlacedRun& run = runs[last_reached(i, num_runs, [this](std::int64_t k) { return runs[k].first; })];
    return static_cast<std::uint64_t>(run.logical + i - run.first);
  }
};

// Numbers that are the same for all elements: rate is lr / (1 - beta1^step), root_scale 1 / sqrt(1 -
// beta2^step).
template <class F>
struct AdamWNumbers {
  F beta1, rest1, beta2, rest2, scale, rate, root_scale, eps, keep;
};

template <class Weights, class M>
struct AdamW {
  using F = Wide<M>;
  static constexpr int columns = columns_of<F>;
  Weights weights;
  const F* gradient;
  M *m, *v;
  AdamWNumbers<F> n;
  bool is_aligned() const {
    return weights.template are_aligned<columns>() && are_aligned<columns>(gradient, m, v);
  }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t, Columns<N> at) const {
    F weight[N], first[N], second[N];
    weights.read(at, weight);
    const auto gradients = at.read(gradient);
    const auto means = at.read(m), squares = at.read(v);
    for (int k = 0; k < N; ++k) {
      const F g = n.scale * gradients[k];
      first[k] = n.beta1 * means[k] + n.rest1 * g;
      second[k] = n.beta2 * squares[k] + n.rest2 * g * g;
      weight[k] = n.keep * weight[k] - n.rate * first[k] / (std::sqrt(second[k]) * n.root_scale + n.eps);
    }
    at.write(m, [&](int k) { return first[k]; });
    at.write(v, [&](int k) {
      if constexpr (std::is_same_v<Weights, WeightsRoundedAtRandom>)
        return bf16::stochastic(second[k], static_cast<std::uint16_t>(weights.word(at.begin + k)));
      else
        return second[k];
    });
    weights.write(at, [&](int k) { return weight[k]; });
  }
};

}  // namespace echelon::rows
