#pragma once

#include <limits>

namespace echelon {

// The least shift, to a few digits, of numbers of this magnitude for which holds(shift), which must be
// monotone. 0 if it holds without a shift; infinite if it does not hold at four times the magnitude.
template <class Holds>
double least_shift(double magnitude, const Holds& holds) {
  if (holds(0.0)) return 0;
  double fails = 0, shift = 0x1p-64 * magnitude + std::numeric_limits<double>::min();
  for (; !holds(shift); shift *= 2) {
    if (!(shift <= 4 * magnitude)) return std::numeric_limits<double>::infinity();
    fails = shift;
  }
  for (int i = 0; i < 12; ++i) {
    const double middle = (fails + shift) / 2;
    (holds(middle) ? shift : fails) = middle;
  }
  return shift;
}

}  // namespace echelon
