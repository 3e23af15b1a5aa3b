// The computation that all kinds of context parallelism share: attention of this rank's queries to the keys
// and values of one ring index, as these arrive.
#pragma once

#include <vector>

#include "base/split.h"
#include "comm/rank.h"
#include "parallel/heads.h"
#include "spec/context_layout.h"

namespace echelon {

// The sequences of a microbatch, as a rank's attention sees them.
struct Sequences {
  std::int64_t batch = 0;
  // (batch * core tokens, i32), in the order of ContextLayout::runs: the first position that each token sees,
  // of its document or its window. Undefined: position 0 for all.
  Tensor first_positions;
};

// For S core tokens of each of B sequences, and H query and Hkv key/value heads on this rank. q, out and
// their gradients are (B*S, H D); kv and its gradient are (B*S, 2 Hkv D) = [k | v]; lse and delta hold B*S*H
// numbers: for each sequence and run, head by head.
class ContextBlocks {
 public:
  // All arguments outlive this.
  ContextBlocks(const Rank& rank, const ContextLayout& layout, const Heads& heads,
                const Sequences& sequences);

  const Rank& rank() const { return rank_; }
  // Allocates keys and values of one ring index, or their gradients.
  Tensor make_kv() const;

  // Accumulates attention to the keys of `source` into out and lse. A rank's own keys must come first.
  void forward(const Tensor& q, const Tensor& kv, int source, const Tensor& out, const Tensor& lse) const;
  // Accumulates into dq and dkv.
  void backward(const Tensor& q, const Tensor& kv, int source, const Tensor& dout, const Tensor& lse,
                const Tensor& delta, const Tensor& dq, const Tensor& dkv) const;

 private:
  // A run of positions of one sequence, and its rows among the core tokens.
  struct Part {
    PositionRun run;
    Range rows;
  };
  std::vector<Part> parts_of(int ring_index) const;
  // Calls body(queries, keys, shape) for every pair of runs that the mask does not wholly hide from each
  // other.
  template <class Body>
  void each_pair(int source, const Body& body) const;
  Tensor first_keys(const Part& queries, const Part& keys) const;

  const Rank& rank_;
  const ContextLayout& layout_;
  const Heads& heads_;
  const Sequences& sequences_;
  int own_;  // ring index
};

}  // namespace echelon
