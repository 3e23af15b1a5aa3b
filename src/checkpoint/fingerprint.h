// What a run's weights are, in one number that no mesh shows in: the sum, modulo 2^64, of XXH3 of each
// logical element (its parameter's name, its place, its bits). Whoever holds elements adds up theirs, each
// element by one rank alone, and the sum over the ranks is the same however the parameters are cut. The bits
// are those that a checkpoint stores: the masters where there are some, and the biases of routers too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"

namespace echelon {

// This rank's share of it, computed by a thread beside the training.
class FingerprintTaker {
 public:
  FingerprintTaker();
  ~FingerprintTaker();
  FingerprintTaker(const FingerprintTaker&) = delete;
  FingerprintTaker& operator=(const FingerprintTaker&) = delete;

  // Nothing is under way. Returns when this rank's elements are copied; `step`: what they are the weights
  // after.
  void start(const Rank& rank, const ParameterStore& parameters, const ModelSpec& model,
             const RouterBiases& biases, std::int64_t step);
  bool under_way() const { return state_ != nullptr; }
  std::int64_t step() const;
  // Waits; then nothing is under way.
  std::uint64_t take();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// 16 hexadecimal digits.
std::string fingerprint_text(std::uint64_t fingerprint);

}  // namespace echelon
