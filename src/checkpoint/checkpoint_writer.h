// Writes checkpoints in the background: start() copies what this rank owns, a thread writes it, and once
// every rank's part is on disk commit() gives the checkpoint its name. Tensors on a device are copied during
// the next step's passes, on a separate stream; the next update of the weights waits for that.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "tensor/device_stream.h"

namespace echelon {

class CheckpointWriter {
 public:
  // On each rank of the mesh that holds the parameters, all with the same `directory`.
  CheckpointWriter(const Rank& rank, std::string directory);
  // Rank 0 removes what was not committed.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Must not be called while a checkpoint is being written. Returns once the copy is made, or queued on a
  // device. RunError if the directory cannot be created, or the host has no page-locked memory for the copy.
  void start(const ParameterStore& parameters, const CheckpointInfo& info,
             const std::vector<CarriedTensor>& carried, const RouterBiases& biases);
  bool under_way() const { return state_ != nullptr; }
  // written(): whether this rank's part is on disk; RunError if it cannot be written. wait(): waits for that.
  bool written() const;
  void wait() const;
  // Call on every rank, once every rank's part is written. Rank 0 completes the checkpoint, and then removes
  // all but the last `keep` (0: none is removed). Returns its path. RequestError if there is one already.
  std::string commit(std::int64_t keep);

  // For tests: called by the writing thread, with "write" after each tensor and "written" after the last; and
  // on rank 0 with "commit" before the checkpoint gets its name.
  void set_watch(std::function<void(const char* at)> watch) { watch_ = std::move(watch); }

 private:
  struct State;
  void write_manifest() const;
  void queue_copies(State& state, const ParameterStore& parameters);

  const Rank& rank_;
  std::filesystem::path directory_;
  std::function<void(const char*)> watch_;
  std::unique_ptr<PinnedMemory> pinned_;  // for copies from a device, reused for each checkpoint
  std::unique_ptr<State> state_;
};

}  // namespace echelon
