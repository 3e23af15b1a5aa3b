// AdamW (Loshchilov & Hutter 2019) of weights however they are kept.
#pragma once

#include <cmath>
#include <type_traits>

#include "base/bf16.h"
#include "base/philox_words.h"
#include "base/split_weight.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// How weights are kept: as they are; as values and remainders; or in bf16 alone, rounded at random by the
// word of the logical element.
template <class F>
struct WholeWeights {
  F* weights;
  ECHELON_HOST_DEVICE F operator()(std::int64_t i) const { return weights[i]; }
  ECHELON_HOST_DEVICE void store(F weight, std::int64_t i) const { weights[i] = weight; }
};
struct SplitWeights {
  bf16* values;
  std::int16_t* remainders;
  ECHELON_HOST_DEVICE float operator()(std::int64_t i) const {
    return SplitWeight(values[i], remainders[i]).joined();
  }
  ECHELON_HOST_DEVICE void store(float weight, std::int64_t i) const {
    const SplitWeight split(weight);
    values[i] = split.value;
    remainders[i] = split.remainder;
  }
};
// Element first and those behind it are logical elements from `logical` on.
struct PlacedRun {
  std::int64_t first, logical;
};
struct WeightsRoundedAtRandom {
  bf16* weights;
  PhiloxKey key;
  const PlacedRun* runs;  // by `first`; the first is 0
  std::int64_t num_runs;
  ECHELON_HOST_DEVICE float operator()(std::int64_t i) const { return weights[i]; }
  ECHELON_HOST_DEVICE void store(float weight, std::int64_t i) const {
    std::int64_t begin = 0, end = num_runs;  // the run lies in [begin, end)
    while (end - begin > 1) {
      const std::int64_t middle = begin + (end - begin) / 2;
      (runs[middle].first <= i ? begin : end) = middle;
    }
    const auto element = static_cast<std::uint64_t>(runs[begin].logical + i - runs[begin].first);
    weights[i] = bf16::stochastic(weight, static_cast<std::uint16_t>(philox_word(key, element) >> 16));
  }
};

// What is the same for all elements: rate is lr / (1 - beta1^step), root_scale 1 / sqrt(1 - beta2^step).
template <class F>
struct AdamWNumbers {
  F beta1, rest1, beta2, rest2, scale, rate, root_scale, eps, keep;
};

template <class Weights, class M>
struct AdamW {
  Weights weights;
  const Wide<M>* gradient;
  M *m, *v;
  AdamWNumbers<Wide<M>> n;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t i) const {
    using F = Wide<M>;
    const F weight = weights(i), g = n.scale * gradient[i];  // all is read before anything is written
    const F first = n.beta1 * m[i] + n.rest1 * g, second = n.beta2 * v[i] + n.rest2 * g * g;
    m[i] = M(first);
    v[i] = M(second);
    weights.store(n.keep * weight - n.rate * first / (std::sqrt(second) * n.root_scale + n.eps), i);
  }
};

}  // namespace echelon::rows
