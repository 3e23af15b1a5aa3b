// Flips one bit on purpose, as a defective machine does (Dixit et al. 2021,
// https://arxiv.org/abs/2102.11245), to show that it is detected.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/witness.h"
#include "train/training_parts.h"

namespace echelon {

enum class FlipWhere { weights, moments, gradients, activations, messages };
const char* name_of(FlipWhere where);
std::optional<FlipWhere> parse_flip_where(const std::string& text);  // empty: no such name

struct PlantedFlip {
  int rank = 0;
  std::int64_t step = 0;  // counts from 1
  // Index of the bit in the rank's tensors of that kind, concatenated, modulo their number of bits. For
  // messages: in what the rank sends from that step on.
  std::uint64_t bit = 0;
  FlipWhere where = FlipWhere::weights;
  bool lasting = false;  // every time the step runs; else only the first time
};
std::string text_of(const PlantedFlip& flip);  // as on the command line: --flip R:S:B:WHERE

// Applies the flip. Weights (with their rounding errors) and moments: before the step's first instruction.
// Gradients: those of a layer group when its passes are over but before it is summed over ranks, or this
// rank's sums. Activations: what the step's first forward pass keeps for its backward pass.
class FlipPlanter {
 public:
  // The witness outlives it.
  FlipPlanter(const PlantedFlip& flip, Witness& witness) : flip_(flip), witness_(witness) {}

  // Adds the hooks that it needs.
  void add_to(TrainerHooks& hooks);
  // Call before the first step: the parameters whose bits are meant.
  void set_parameters(const ParameterStore& parameters) { parameters_ = &parameters; }
  // Call before a step runs, for the first time or again.
  void begin_step(std::int64_t step);
  // Whether the bit has been flipped.
  bool struck() const {
    return flip_.where == FlipWhere::messages ? due_ && !witness_.is_planted() : struck_;
  }

 private:
  void strike_state();
  void strike_gradients(std::optional<int> group);
  void strike_kept(const Stage::Saved& saved);
  // Flips the bit, counted over all these tensors; does nothing if they are empty.
  void strike(const std::vector<Tensor>& all);
  void strike(const Tensor& tensor, std::uint64_t bit);

  const PlantedFlip flip_;
  const ParameterStore* parameters_ = nullptr;
  Witness& witness_;
  bool due_ = false, struck_ = false;
};

}  // namespace echelon
