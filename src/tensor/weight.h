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
  // The same where the rows of a sum lie on several ranks: which of them adds it up, by how much of what is
  // gathered with it stands before it, from 0 to 1; and whether each tp rank has a part of it.
  double place = 0;
  bool is_cut = false;
  bool defined() const { return value.defined(); }
};

}  // namespace echelon
