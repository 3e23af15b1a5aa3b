// Reduces any number of ranks to a power of two, for algorithms that need one.
#pragma once

#include "comm/collectives.h"

namespace echelon {

// n ranks split by halves (halving_tree.h) into p blocks of one or two neighbours, p = 2^k <= n < 2^(k+1). A
// sum of blocks 2i and 2i+1, then of neighbouring pairs, and so on, is grouped by halves of all n ranks.
struct Fold {
  Fold(int n, int rank);
  int blocks = 1;    // p
  int index = 0;     // of this rank's block
  int first = 0;     // first rank of the block, which acts for it
  int second = -1;   // the block's other rank; -1: none
  bool acts = true;  // this rank is the first

  static int first_of(int n, int index);  // first rank of block `index`
};

// fold(), before the algorithm: the second rank of a block sends x to the first, which adds it to its own.
// unfold(), after it: the first sends the result back. fold() returns false on second ranks, which take no
// part in between.
bool fold(Communicator& group, const Fold& at, const Tensor& x, ReduceOp op, Scratch& scratch);
void unfold(Communicator& group, const Fold& at, const Tensor& x);

// The cost of both together: two more steps if n is not a power of two.
Cost fold_cost(int n, int rank, std::int64_t count);

}  // namespace echelon
