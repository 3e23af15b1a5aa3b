// Activations that leave the rank's memory between a layer's forward and its backward pass (SuperNeurons,
// Wang et al. 2018, https://arxiv.org/abs/1801.04380, moves them to the host so). On the cpu they go to files
// (scratch_file.h). On an accelerator they go to the host's page-locked memory over a stream of its own, and
// come back over another one layer before they are read. Bytes each way: those that the layer keeps, once a
// microbatch.
#pragma once

#include <memory>

#include "model/block_run.h"
#include "spec/memory.h"
#include "spec/plan.h"

namespace echelon {

class HostPieces;

// Of one block's microbatch: what is not here.
struct PutAway;

class OffloadedActivations {
 public:
  // `rank` outlives it, and what it has put away.
  OffloadedActivations(const Rank& rank, const Plan& plan);

  // What a forward pass has left to its backward pass goes, and its memory with it. What ScratchFile throws;
  // RunError where there is no such memory.
  void put_away(BlockState& state) const;
  // It is asked for: its memory is here, and what lies in it will be. Nothing where it has not gone.
  void bring(BlockState& state) const;
  // From here on the rank's kernels find it.
  void wait_for(BlockState& state) const;

  // Since the last call.
  HostActivations take_moved() const;

 private:
  const Rank* rank_;
  std::shared_ptr<HostPieces> pieces_;
};

}  // namespace echelon
