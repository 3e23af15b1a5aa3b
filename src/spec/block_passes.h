// What a block keeps from its forward pass to its backward pass and what it recomputes, derived from what the
// backward pass of each op reads.
#pragma once

#include <vector>

#include "spec/block.h"
#include "spec/recompute.h"

namespace echelon {

// Ops to be run in order.
struct OpSequence {
  std::vector<int> ops;
  // by value: the index in `ops` of the last op that reads it; -1: none does
  std::vector<int> last_use;
  // by value: whether something reads it after all these ops
  std::vector<bool> keeps;
  bool lets_go(int value, int place) const {
    const auto v = static_cast<std::size_t>(value);
    return !keeps[v] && last_use[v] <= place;
  }
};

// Whether all these ops are too cheap to count, such as norms recomputed from their statistics.
bool is_cheap(const BlockProgram& program, const OpSequence& sequence);

struct BlockPasses {
  OpSequence forward;                  // of training
  OpSequence evaluation;               // keeps only the block's output
  std::vector<OpSequence> again;       // by op: what is recomputed before its backward pass
  std::vector<std::vector<int>> done;  // by op: values that no backward pass reads after its own
};
BlockPasses block_passes(const BlockProgram& program, const Recompute& recompute);

}  // namespace echelon
