// Measures how far rounding can move the results of a computation: kernels whose operands and results are
// perturbed by about as much as rounding may change them (Monte Carlo arithmetic, Parker 1997; Wilkinson's
// backward errors, drawn at random). A result that is a difference of large numbers moves in proportion to
// these, not to what is left of them.
#pragma once

#include <cstdint>
#include <memory>

#include "tensor/kernels_host.h"

namespace echelon {

class RoundingNoise : public HostBackend {
 public:
  // Starts a trial; the same number gives the same draws. `narrow`: whether bf16 tensors are perturbed too,
  // which they are not if both runs round the same numbers.
  virtual void begin(std::uint64_t trial, bool narrow = true) = 0;
  virtual void end() = 0;
};

// Behaves like `exact` until begin(). Copies of operands are in the arena (category other). `of_operands`: an
// additional relative error of operands of f32 products, if other kernels round them.
std::shared_ptr<RoundingNoise> make_rounding_noise(Kernels& exact, Arena& arena, double of_operands = 0);

}  // namespace echelon
