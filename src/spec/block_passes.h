// What of a block is kept from its forward to its backward pass, and what is made again: derived from what
// each op's backward pass reads.
#pragma once

#include <vector>

#include "spec/block.h"
#include "spec/plan.h"

namespace echelon {

// Of an op's inputs and outputs those that its backward pass reads.
std::vector<int> backward_reads(const BlockOp& op);

// Whether a value is always made again: a norm's output, which costs less to make than to keep, and an
// activation's, which its backward pass makes beside the gradient.
bool is_cheap(const BlockProgram& program, int value);
// The second of these: whoever reads it waits for that backward pass.
bool comes_with_backward(const BlockProgram& program, int value);

// Ops to be run in order.
struct OpSequence {
  std::vector<int> ops;
  std::vector<int>
      last_use;             // by value: the place in `ops` behind which none of them reads it; -1: none does
  std::vector<bool> keeps;  // by value: it is read after all of them
  bool lets_go(int value, int place) const {
    const auto v = static_cast<std::size_t>(value);
    return !keeps[v] && last_use[v] <= place;
  }
};

struct BlockPasses {
  OpSequence forward;                  // of training
  OpSequence evaluation;               // keeps nothing but the block's output
  std::vector<OpSequence> again;       // by op: what is made again before its backward pass
  std::vector<std::vector<int>> done;  // by op: values that no backward pass reads behind its own
};
BlockPasses block_passes(const BlockProgram& program, Recompute recompute);

}  // namespace echelon
