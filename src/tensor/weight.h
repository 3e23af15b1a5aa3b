#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace echelon {

// Views of a parameter (or of adjacent parameters that are used as one matrix) and of its gradient.
struct Weight {
  Tensor value;
  Tensor gradient;
  // Under invariant numerics, partial sums over microbatches (tensor/sequence_sums.h).
  std::vector<Tensor> waiting{};
  // Whether each tp rank uses it with all rows, even under sequence parallelism.
  bool all_rows = false;
  bool defined() const { return value.defined(); }
};

// The output layer's, or a part of them.
struct OutputWeights {
  Weight table;   // (V, C)
  Weight bias{};  // (V); undefined if the model has none

  // Those that are trained, the table first.
  std::vector<const Weight*> trained() const {
    std::vector<const Weight*> all;
    for (const Weight* one : {&table, &bias})
      if (one->gradient.defined()) all.push_back(one);
    return all;
  }
};

}  // namespace echelon
