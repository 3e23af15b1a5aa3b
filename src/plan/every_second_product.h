// Selective activation checkpointing as in torchtitan: of a layer's matrix products, the output of every
// second one is kept, beginning with the first.
#pragma once

#include <cstddef>
#include <vector>

#include "spec/block.h"

namespace echelon {

// An op of ours may hold several matrices side by side; to torchtitan each of them is a product.
struct SplitProduct {
  std::size_t op = 0;       // index in the program
  double kept_columns = 0;  // of its output, on one rank of tp
  double again = 0;         // the fraction of its columns that the backward pass recomputes
};
// A layer's products in order, except those inside experts: these are recomputed as a whole.
std::vector<SplitProduct> every_second_product(const BlockProgram& layer, int tp);

}  // namespace echelon
