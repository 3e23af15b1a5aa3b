#pragma once

#include <limits>

namespace echelon {

// The least shift of numbers of this magnitude, to a few digits, for which holds(shift); what holds for one
// holds for all larger ones. 0 where it holds without; infinite where it does not for four times the
// magnitude.
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
