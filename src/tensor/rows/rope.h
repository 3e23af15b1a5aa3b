// Rotary positions (Su 2021), the half-split form of Llama.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "spec/rope.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// Angles are made in double: in f32 the angle of a late position is off by more than the arithmetic that
// follows.
template <class T>
struct Rope {
  Matrix<T> x;
  std::int64_t head_dim;
  const std::int32_t* positions;
  const double* frequencies;  // (pairs)
  std::int64_t pairs;
  double factor, growth;
  std::int64_t growth_length;
  bool inverse;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t r) const {
    using F = Wide<T>;
    const double grown = grown_factor(factor, growth, growth_length, positions[r]);
    for (std::int64_t pair = team.lane(); pair < pairs; pair += team.lanes()) {
      const double angle = static_cast<double>(positions[r]) * frequencies[pair];
      const F c = F(grown * std::cos(angle)), s = F(grown * (inverse ? -std::sin(angle) : std::sin(angle)));
      for (std::int64_t j = pair; j < x.cols; j += head_dim) {
        const F low = x[r][j], high = x[r][j + pairs];
        x[r][j] = T(low * c - high * s);
        x[r][j + pairs] = T(high * c + low * s);
      }
    }
  }
};

}  // namespace echelon::rows
