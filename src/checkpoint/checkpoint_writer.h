// Writing a checkpoint beside the training: start() copies what this rank owns, a thread writes it, and once
// every rank's part is on disk commit() gives the whole its name. From a device it is copied beside the next
// step's passes, on a stream of its own; what updates the weights waits for that.
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
  // By each rank of the mesh that holds the parameters; all see the same `directory`.
  CheckpointWriter(const Rank& rank, std::string directory);
  // What is not committed is not there: rank 0 removes it.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Nothing is under way. Returns when the copy is made, or queued on a device. RunError where the directory
  // cannot be made, or the host has no page-locked memory for the copy.
  void start(const ParameterStore& parameters, const CheckpointInfo& info,
             const std::vector<CarriedTensor>& carried, const RouterBiases& biases);
  bool under_way() const { return state_ != nullptr; }
  // Whether this rank's part is on disk. RunError where it cannot be written; wait(): the same, in the end.
  bool written() const;
  void wait() const;
  // By every rank, when every rank's part is written. Rank 0 makes the checkpoint whole, and then removes all
  // but the last `keep` (0: none is removed). Returns its path. RequestError where there is one already.
  std::string commit(std::int64_t keep);

  // For tests: called by the thread that writes, with "write" between two tensors and with "written" after
  // the last, and with "commit" on rank 0 before the checkpoint has its name.
  void set_watch(std::function<void(const char* at)> watch) { watch_ = std::move(watch); }

 private:
  struct State;
  void write_manifest() const;
  void queue_copies(State& state, const ParameterStore& parameters);

  const Rank& rank_;
  std::filesystem::path directory_;
  std::function<void(const char*)> watch_;
  std::unique_ptr<PinnedMemory> pinned_;  // of the copies of a device, one checkpoint after another
  std::unique_ptr<State> state_;
};

}  // namespace echelon
