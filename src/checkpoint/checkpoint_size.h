// How much a checkpoint takes on disk, before one is written.
#pragma once

#include <cstdint>
#include <string>

#include "spec/plan.h"

namespace echelon {

// Bytes of the tensors in a checkpoint of this plan's run, in the files of all ranks: weights and moments in
// the master's precision, what compression carries, and the routers' biases that the plan learns. Without the
// files' headers, about 100 bytes for each tensor.
std::int64_t checkpoint_bytes(const Plan& plan);

// The checkpoints that a run will hold at a time beside those that are there.
struct CheckpointDemand {
  std::int64_t written = 0;  // by the run
  std::int64_t keep = 0;     // of all, the last ones; 0: all
  std::int64_t there = 0;    // at its start
  // With `keep`, a checkpoint is removed once the next one is complete.
  std::int64_t most() const;
};

// A sentence if the disk of `directory`, with `free` bytes, is too small for these checkpoints of `one` bytes
// each; empty if it is not.
std::string small_disk_note(const std::string& directory, double free, std::int64_t one,
                            const CheckpointDemand& demand);

}  // namespace echelon
