// Sums whose terms are computed block by block and added by the tree of base/halving_tree.h
// (docs/invariance.md).
#pragma once

#include <utility>
#include <vector>

#include "base/halving_tree.h"
#include "tensor/kernels.h"

namespace echelon {

// sum = the sum of the terms of `blocks` blocks, at least one. make(block, to) computes a term; like_sum()
// allocates space for a waiting one.
template <class Room, class Make>
void sum_by_blocks(Kernels& kernels, std::int64_t blocks, const Tensor& sum, const Room& like_sum,
                   const Make& make) {
  std::vector<Tensor> waiting{sum};
  for (int i = 0; i < most_waiting(blocks); ++i) waiting.push_back(like_sum());
  for (std::int64_t b = 0; b < blocks; ++b) {
    const TreePlace place = tree_place(blocks, b);
    auto at = static_cast<std::size_t>(place.waiting);
    make(b, std::as_const(waiting[at]));
    for (int m = 0; m < place.merges; ++m, --at) kernels.add(waiting[at], waiting[at - 1]);
  }
}

}  // namespace echelon
