// What of a block is kept from its forward to its backward pass, and what is made again: derived from what
// each op's backward pass reads.
#pragma once

#include <vector>

#include "spec/block.h"
#include "spec/recompute.h"

namespace echelon {

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

// Whether nothing of it takes time worth counting: norms are made again from their statistics.
bool is_cheap(const BlockProgram& program, const OpSequence& sequence);

struct BlockPasses {
  OpSequence forward;                  // of training
  OpSequence evaluation;               // keeps nothing but the block's output
  std::vector<OpSequence> again;       // by op: what is made again before its backward pass
  std::vector<std::vector<int>> done;  // by op: values that no backward pass reads behind its own
};
BlockPasses block_passes(const BlockProgram& program, const Recompute& recompute);

}  // namespace echelon
