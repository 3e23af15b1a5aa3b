#include "comm/fold.h"

#include <bit>

#include "base/halving_tree.h"
#include "comm/exchange.h"

namespace echelon {

Fold::Fold(int n, int rank) : blocks(static_cast<int>(std::bit_floor(static_cast<unsigned>(n)))) {
  int begin = 0, end = n;
  for (int level = blocks; level > 1; level /= 2) {
    const int middle = halving_cut(begin, end);
    index = 2 * index + (rank < middle ? 0 : 1);
    (rank < middle ? end : begin) = middle;
  }
  first = begin;
  if (end - begin == 2) second = begin + 1;
  acts = rank == first;
}

int Fold::first_of(int n, int index) {
  int begin = 0, end = n;
  for (int bit = static_cast<int>(std::bit_floor(static_cast<unsigned>(n))) / 2; bit > 0; bit /= 2) {
    const int middle = halving_cut(begin, end);
    ((index & bit) == 0 ? end : begin) = middle;
  }
  return begin;
}

bool fold(Communicator& group, const Fold& at, const Tensor& x, ReduceOp op, Scratch& scratch) {
  if (!at.acts) {
    group.send(x, at.first).wait();
  } else if (at.second >= 0) {
    const Tensor theirs = scratch.first(x, x.numel());
    group.recv(theirs, at.second).wait();
    reduce_two(op, x, theirs, x);
  }
  return at.acts;
}

void unfold(Communicator& group, const Fold& at, const Tensor& x) {
  if (!at.acts)
    group.recv(x, at.first).wait();
  else if (at.second >= 0)
    group.send(x, at.second).wait();
}

Cost fold_cost(int n, int rank, std::int64_t count) {
  const Fold at(n, rank);
  if (at.blocks == n) return {};
  if (at.second < 0) return {.steps = 2};
  return {2, 1, count, at.acts ? count : 0};
}

}  // namespace echelon
