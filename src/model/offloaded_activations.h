// Offloads activations between a layer's forward and its backward pass (to the host, as in SuperNeurons, Wang
// et al. 2018, https://arxiv.org/abs/1801.04380). On the CPU they go to files (scratch_file.h). On an
// accelerator they go to pinned host memory over a stream of its own, and return over another one, a layer
// before they are read. Bytes each way: what the layer keeps, once per microbatch.
#pragma once

#include <memory>

#include "model/block_run.h"
#include "spec/memory.h"
#include "spec/plan.h"

namespace echelon {

class HostPieces;

// The offloaded part of a block's state for one microbatch.
struct PutAway;

class OffloadedActivations {
 public:
  // `rank` outlives this and everything offloaded.
  OffloadedActivations(const Rank& rank, const Plan& plan);

  // Offloads what a forward pass keeps, and frees its memory. Throws as ScratchFile does; RunError if there
  // is no pinned memory.
  void put_away(BlockState& state) const;
  // Starts to bring it back: memory is allocated, and contents will arrive. Does nothing if it was not
  // offloaded.
  void bring(BlockState& state) const;
  // After this the rank's kernels may read it.
  void wait_for(BlockState& state) const;

  // Since the last call.
  HostActivations take_moved() const;

 private:
  const Rank* rank_;
  std::shared_ptr<HostPieces> pieces_;
};

}  // namespace echelon
