// Rotary positions (Su 2021), the half-split form of Llama.
#pragma once

#include <cmath>

#include "base/bf16.h"
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
  double factor;
  bool inverse;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t r) const {
    using F = Wide<T>;
    for (std::int64_t pair = team.lane(); pair < pairs; pair += team.lanes()) {
      const double angle = static_cast<double>(positions[r]) * frequencies[pair];
      const F c = F(factor * std::cos(angle)), s = F(factor * (inverse ? -std::sin(angle) : std::sin(angle)));
      for (std::int64_t j = pair; j < x.cols; j += head_dim) {
        const F low = x[r][j], high = x[r][j + pairs];
        x[r][j] = T(low * c - high * s);
        x[r][j + pairs] = T(high * c + low * s);
      }
    }
  }
};

}  // namespace echelon::rows
