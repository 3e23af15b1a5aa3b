// What a rank's training goes on from, between two steps: weights and what they are rounded off by, moments,
// what compression carries, the biases of routers. Named tensor by tensor, and a copy of it all to go back
// to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/routing_balance.h"
#include "train/trainer.h"

namespace echelon {

struct HeldState {
  std::string what;  // "first moment of model.layers.0.mlp.up_proj.weight"
  // The same number on each rank that holds the same elements, which have the same bits there; on no other
  // rank where `what` is this rank's alone.
  std::uint64_t key = 0;
  Tensor tensor;  // contiguous
};
// Without the biases of routers, which the stages hold.
std::vector<HeldState> held_state(const Rank& rank, const Trainer& trainer);

// Fingerprints of it: of each tensor, and behind them of each layer's biases.
struct StateFingerprints {
  std::vector<std::string> what;
  std::vector<std::uint64_t> keys, fingerprints;
};
StateFingerprints fingerprints_of(const std::vector<HeldState>& state, const RouterBiases& biases);

// As many bytes of the rank's arena (MemoryCategory::other) as the state has.
class StateCopy {
 public:
  // Both outlive it. Undefined contents.
  StateCopy(const Rank& rank, Trainer& trainer);

  const std::vector<HeldState>& state() const { return state_; }
  // Of what the trainer has now.
  StateFingerprints fingerprints() const {
    return fingerprints_of(state_, trainer_.stages().router_biases());
  }
  // Of the state before `step`, whose fingerprints these are.
  void keep(std::int64_t step, StateFingerprints fingerprints);
  // RunError when the copy is not what was kept.
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
