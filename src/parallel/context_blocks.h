// What every kind of context parallelism computes: the queries of this rank against the keys and values of
// one ring index, as they come.
#pragma once

#include <vector>

#include "base/split.h"
#include "comm/rank.h"
#include "parallel/heads.h"
#include "spec/context_layout.h"

namespace echelon {

// The sequences of a microbatch as the attention of a rank sees them.
struct Sequences {
  std::int64_t batch = 0;
  // (batch * core tokens, i32), in the order of ContextLayout::runs: the first position that a token sees, of
  // its document or its window. Undefined: position 0.
  Tensor first_positions;
};

// S core tokens of each of B sequences, H query and Hkv key/value heads here. q, out and their gradients are
// (B*S, H D), kv and its gradient (B*S, 2 Hkv D) = [k | v]; lse and delta hold B*S*H numbers, for each
// sequence and run those of one head after another.
class ContextBlocks {
 public:
  // All outlive this.
  ContextBlocks(const Rank& rank, const ContextLayout& layout, const Heads& heads,
                const Sequences& sequences);

  const Rank& rank() const { return rank_; }
  // Room for keys and values of one ring index, or their gradients.
  Tensor make_kv() const;

  // Adds what the keys of `source` say to out and lse. A rank's own keys come first.
  void forward(const Tensor& q, const Tensor& kv, int source, const Tensor& out, const Tensor& lse) const;
  // Adds to dq and dkv.
  void backward(const Tensor& q, const Tensor& kv, int source, const Tensor& dout, const Tensor& lse,
                const Tensor& delta, const Tensor& dq, const Tensor& dkv) const;

 private:
  // A run of one sequence among its core tokens.
  struct Part {
    PositionRun run;
    Range rows;
  };
  std::vector<Part> parts_of(int ring_index) const;
  // body(queries, keys, shape) for every pair of runs of which the mask leaves something.
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
