// How far rounding can move the results of a computation, found by moving it: kernels whose operands and
// results are off by about what rounding may make of them (Parker 1997, Monte Carlo arithmetic; Wilkinson's
// backward errors, drawn at random). What a result owes to a difference of large numbers is moved by as much
// as these, not by what is left of them.
#pragma once

#include <cstdint>
#include <memory>

#include "tensor/kernels_host.h"

namespace echelon {

class RoundingNoise : public HostBackend {
 public:
  // The draws of one trial; the same number, the same draws. `narrow`: whether what is kept in bf16 moves
  // too, which it does not where both runs round the same numbers.
  virtual void begin(std::uint64_t trial, bool narrow = true) = 0;
  virtual void end() = 0;
};

// Those of `exact`, until begin(). Copies of operands are in the arena (category other). `of_operands`: what
// the operands of products in f32 are off by beside that, of their size, where others multiply them so.
std::shared_ptr<RoundingNoise> make_rounding_noise(Kernels& exact, Arena& arena, double of_operands = 0);

}  // namespace echelon
