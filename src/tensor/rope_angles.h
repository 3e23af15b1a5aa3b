// Cosines and sines of RoPE (Su 2021) for successive positions, without a table of positions.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "spec/rope.h"

namespace echelon {

// For up to 64 pairs of a head. In double precision, because in f32 the angle of a late position has a larger
// error than the arithmetic that follows. Each position is computed from the previous one by a rotation, and
// afresh at every multiple of 64, so that the numbers depend on the position alone.
class RopeAngles {
 public:
  static constexpr std::int64_t most_pairs = 64;

  // Pairs [first_pair, first_pair + pairs) of a head.
  RopeAngles(const RopeTurns& turns, std::int64_t first_pair, std::int64_t pairs)
      : pairs_(pairs), factor_(turns.factor), growth_(turns.growth), growth_length_(turns.growth_length) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      frequency_[at(i)] = turns.frequencies[at(first_pair + i)];
      step_cosine_[at(i)] = std::cos(frequency_[at(i)]);
      step_sine_[at(i)] = std::sin(frequency_[at(i)]);
    }
  }

  void move_to(std::int64_t position) {
    if (position == position_) return;
    if (position < position_ || position / anew != position_ / anew || position_ < 0)
      start_at(position / anew * anew);
    while (position_ < position) next();
    const double factor = grown_factor(factor_, growth_, growth_length_, position);
    for (std::int64_t i = 0; i < pairs_; ++i) {
      cosine_f32_[at(i)] = static_cast<float>(factor * cosine_[at(i)]);
      sine_f32_[at(i)] = static_cast<float>(factor * sine_[at(i)]);
    }
  }
  const float* cosine() const { return cosine_f32_.data(); }
  const float* sine() const { return sine_f32_.data(); }

 private:
  static constexpr std::int64_t anew = 64;
  template <class F>
  using Row = std::array<F, most_pairs>;
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  void start_at(std::int64_t position) {
    position_ = position;
    for (std::int64_t i = 0; i < pairs_; ++i) {
      const double angle = static_cast<double>(position) * frequency_[at(i)];
      cosine_[at(i)] = std::cos(angle);
      sine_[at(i)] = std::sin(angle);
    }
  }
  void next() {
    ++position_;
    for (std::int64_t i = 0; i < pairs_; ++i) {
      const double c = cosine_[at(i)], s = sine_[at(i)];
      cosine_[at(i)] = c * step_cosine_[at(i)] - s * step_sine_[at(i)];
      sine_[at(i)] = s * step_cosine_[at(i)] + c * step_sine_[at(i)];
    }
  }

  std::int64_t pairs_, position_ = -1;
  double factor_, growth_;
  std::int64_t growth_length_;
  Row<double> frequency_, step_cosine_, step_sine_, cosine_, sine_;
  Row<float> cosine_f32_, sine_f32_;
};

}  // namespace echelon
