// Checkpointing by operation as torchtitan does it: of a layer's products the output of every second one is
// kept, from the first on.
#pragma once

#include <cstddef>
#include <vector>

#include "spec/block.h"

namespace echelon {

// An op's matrices lie side by side, and are products of their own to that program.
struct SplitProduct {
  std::size_t op = 0;       // in the program
  double kept_columns = 0;  // of its output, on one rank of tp
  double again = 0;         // the part of its columns that the backward pass makes again
};
// The products of a layer in their order, those inside of experts left out: they are made again whole.
std::vector<SplitProduct> every_second_product(const BlockProgram& layer, int tp);

}  // namespace echelon
