// A run's weights in one number that does not depend on the mesh: the sum, modulo 2^64, of XXH3 of each
// logical element (its parameter's name, its index, its bits). Each rank sums over its elements, each element
// on one rank only, and the sum over ranks is the same however parameters are cut. The bits are those that a
// checkpoint stores: the master weights if there are some, and the routers' biases too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"

namespace echelon {

// Computes this rank's share of it, on a thread beside the training.
class FingerprintTaker {
 public:
  FingerprintTaker();
  ~FingerprintTaker();
  FingerprintTaker(const FingerprintTaker&) = delete;
  FingerprintTaker& operator=(const FingerprintTaker&) = delete;

  // Must not be called while one is being computed. Returns once this rank's elements are copied; `step`: the
  // step after which these are the weights.
  void start(const Rank& rank, const ParameterStore& parameters, const ModelSpec& model,
             const RouterBiases& biases, std::int64_t step);
  bool under_way() const { return state_ != nullptr; }
  std::int64_t step() const;
  // Waits; afterwards start() may be called again.
  std::uint64_t take();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// 16 hexadecimal digits.
std::string fingerprint_text(std::uint64_t fingerprint);

}  // namespace echelon
