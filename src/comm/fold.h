// A power of two of any number of ranks.
#pragma once

#include "comm/collectives.h"

namespace echelon {

// n ranks cut by halves (halving_tree.h) into p blocks, p = 2^k <= n < 2^(k+1): one or two neighbours each. A
// sum of blocks 2i and 2i+1, then of neighbouring pairs, and so on, is grouped by halves of all n ranks.
struct Fold {
  Fold(int n, int rank);
  int blocks = 1;    // p
  int index = 0;     // of this rank's block
  int first = 0;     // rank: the first of the block, which acts for it
  int second = -1;   // rank: the other one; -1: there is none
  bool acts = true;  // this rank is the first

  static int first_of(int n, int index);  // rank: the first of block `index`
};

// Before: the second rank of a block sends x to the first, which adds it to its own. After: the first sends
// back the result. False on the second ranks, which take no part in between.
bool fold(Communicator& group, const Fold& at, const Tensor& x, ReduceOp op, Scratch& scratch);
void unfold(Communicator& group, const Fold& at, const Tensor& x);

// The cost of both together. Two more steps where n is not a power of two.
Cost fold_cost(int n, int rank, std::int64_t count);

}  // namespace echelon
