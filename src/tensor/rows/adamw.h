// AdamW (Loshchilov & Hutter 2019), with masters and without.
#pragma once

#include <cmath>
#include <type_traits>

#include "base/bf16.h"
#include "base/philox_words.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// How updated weights are stored: as they are, or in bf16 rounded at random by the word of the logical
// element.
struct AsTheyAre {
  template <class F>
  ECHELON_HOST_DEVICE F operator()(F weight, std::int64_t) const {
    return weight;
  }
};
// Element first and those behind it are logical elements from `logical` on.
struct PlacedRun {
  std::int64_t first, logical;
};
struct AtRandom {
  PhiloxKey key;
  const PlacedRun* runs;  // by `first`; the first is 0
  std::int64_t num_runs;
  ECHELON_HOST_DEVICE bf16 operator()(float weight, std::int64_t i) const {
    std::int64_t begin = 0, end = num_runs;  // the run lies in [begin, end)
    while (end - begin > 1) {
      const std::int64_t middle = begin + (end - begin) / 2;
      (runs[middle].first <= i ? begin : end) = middle;
    }
    const auto element = static_cast<std::uint64_t>(runs[begin].logical + i - runs[begin].first);
    return bf16::stochastic(weight, static_cast<std::uint16_t>(philox_word(key, element) >> 16));
  }
};

// What is the same for all elements.
template <class F>
struct AdamWNumbers {
  F beta1, rest1, correction1, beta2, rest2, correction2, scale, lr, eps, keep;
};

template <class T, class Rounding>
struct AdamW {
  T* p;
  const Wide<T>* gradient;
  T *m, *v;
  bf16* rounded;  // or null
  AdamWNumbers<Wide<T>> n;
  Rounding stored;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t i) const {
    using F = Wide<T>;
    const F g = n.scale * gradient[i];
    const F first = n.beta1 * m[i] + n.rest1 * g, second = n.beta2 * v[i] + n.rest2 * g * g;
    m[i] = T(first);
    v[i] = T(second);
    p[i] = stored(
        n.keep * p[i] - n.lr * (first / n.correction1) / (std::sqrt(second / n.correction2) + n.eps), i);
    if (rounded != nullptr) rounded[i] = bf16(p[i]);
  }
};

}  // namespace echelon::rows
