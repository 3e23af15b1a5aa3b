// Rotary positions (Su 2021), in Llama's half-split form.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "spec/rope.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// Angles are computed in double: in f32 the error of a late position's angle would be larger than that of all
// following arithmetic.
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
    constexpr int at_once = 8;  // heads whose elements are read before any is written
    for (std::int64_t pair = team.lane(); pair < pairs; pair += team.lanes()) {
      const Turn turn = turn_by(static_cast<double>(positions[r]) * frequencies[pair]);
      const F c = F(grown * turn.cosine), s = F(grown * (inverse ? -turn.sine : turn.sine));
      for (std::int64_t begin = pair; begin < x.cols; begin += at_once * head_dim) {
        F low[at_once], high[at_once];
        for (int k = 0; k < at_once; ++k)
          if (const std::int64_t j = begin + k * head_dim; j < x.cols)
            low[k] = x[r][j], high[k] = x[r][j + pairs];
        for (int k = 0; k < at_once; ++k)
          if (const std::int64_t j = begin + k * head_dim; j < x.cols) {
            x[r][j] = T(low[k] * c - high[k] * s);
            x[r][j + pairs] = T(high[k] * c + low[k] * s);
          }
      }
    }
    if (growth != 0) grow_rest(team, r);
  }

 private:
  // What is not turned of a head grows with its position alike.
  template <class Team>
  ECHELON_HOST_DEVICE void grow_rest(const Team& team, std::int64_t r) const {
    const Wide<T> grown = Wide<T>(grown_factor(1, growth, growth_length, positions[r]));
    const std::int64_t rest = head_dim - 2 * pairs, all = x.cols / head_dim * rest;
    for (std::int64_t i = team.lane(); i < all; i += team.lanes()) {
      T& at = x[r][i / rest * head_dim + 2 * pairs + i % rest];
      at = T(grown * Wide<T>(at));
    }
  }

  struct Turn {
    double sine, cosine;
  };
  ECHELON_HOST_DEVICE static Turn turn_by(double angle) {
#ifdef __CUDA_ARCH__
    Turn turn;  // the angle is reduced once for both
    sincos(angle, &turn.sine, &turn.cosine);
    return turn;
#else
    return {std::sin(angle), std::cos(angle)};
#endif
  }
};

}  // namespace echelon::rows
