#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace echelon {

// Views of a parameter (or of adjacent parameters that are used as one matrix) and of its gradient.
struct Weight {
  Tensor value;
  Tensor gradient;
  // Under invariant numerics: sums over microbatches that wait for others (tensor/sequence_sums.h).
  std::vector<Tensor> waiting{};
  bool defined() const { return value.defined(); }
};

}  // namespace echelon
