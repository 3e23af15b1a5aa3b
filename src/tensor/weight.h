#pragma once

#include "tensor/tensor.h"

namespace echelon {

// Views of a parameter (or of adjacent parameters that are used as one matrix) and of its gradient.
struct Weight {
  Tensor value;
  Tensor gradient;
  bool defined() const { return value.defined(); }
};

}  // namespace echelon
