// The state from which a rank's training continues between two steps: weights with their rounding errors,
// moments, what compression carries, router biases. Lists it tensor by tensor, and keeps a copy of it all to
// return to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/routing_balance.h"
#include "train/trainer.h"

namespace echelon {

struct HeldState {
  std::string what;  // "first moment of model.layers.0.mlp.up_proj.weight"
  // The same on each rank that holds the same elements, whose bits must then agree; unique if this state is
  // this rank's alone.
  std::uint64_t key = 0;
  Tensor tensor;  // contiguous
};
// Without router biases, which the stages hold.
std::vector<HeldState> held_state(const Rank& rank, const Trainer& trainer);

// Fingerprints of each tensor, then of each layer's biases.
struct StateFingerprints {
  std::vector<std::string> what;
  std::vector<std::uint64_t> keys, fingerprints;
};
StateFingerprints fingerprints_of(const std::vector<HeldState>& state, const RouterBiases& biases);

// Takes as many bytes of the rank's arena (MemoryCategory::other) as the state.
class StateCopy {
 public:
  // Both outlive it. Contents are undefined at first.
  StateCopy(const Rank& rank, Trainer& trainer);

  const std::vector<HeldState>& state() const { return state_; }
  // Fingerprints of the trainer's current state.
  StateFingerprints fingerprints() const {
    return fingerprints_of(state_, trainer_.stages().router_biases());
  }
  // Copies the state before `step`, which has these fingerprints.
  void keep(std::int64_t step, StateFingerprints fingerprints);
  // RunError if the copy is not what was kept.
  void restore() const;
  std::int64_t step() const { return step_; }

 private:
  const Rank& rank_;
  Trainer& trainer_;
  std::vector<HeldState> state_;
  std::vector<HeldState> copies_;
  RouterBiases biases_;
  StateFingerprints fingerprints_;
  std::int64_t step_ = 0, updates_ = 0;
};

}  // namespace echelon
