// One bit changed on purpose, as a defective machine does (Dixit et al. 2021,
// https://arxiv.org/abs/2102.11245), to see that it is found.
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
std::optional<FlipWhere> parse_flip_where(const std::string& text);  // no value: none of them

struct PlantedFlip {
  int rank = 0;
  std::int64_t step = 0;  // counts from 1
  // Of the rank's tensors of that kind, one behind another, modulo their number of bits. Of messages: of what
  // the rank sends from that step on.
  std::uint64_t bit = 0;
  FlipWhere where = FlipWhere::weights;
  bool lasting = false;  // whenever the step is run; else the first time
};
std::string text_of(const PlantedFlip& flip);  // as on the command line: --flip R:S:B:WHERE

// What the flip is of a rank's weights (and what they are rounded off by) and moments: before the step's
// first instruction. Of gradients: those of a layer group when its passes are over and it has not been summed
// over ranks, or this rank's sums. Of activations: what the step's first forward pass keeps for its backward
// pass.
class FlipPlanter {
 public:
  // The witness outlives it.
  FlipPlanter(const PlantedFlip& flip, Witness& witness) : flip_(flip), witness_(witness) {}

  // Adds what it needs.
  void add_to(TrainerHooks& hooks);
  // Before the first step: whose bits they are.
  void set_parameters(const ParameterStore& parameters) { parameters_ = &parameters; }
  // A step is about to run, for the first time or again.
  void begin_step(std::int64_t step);
  // Whether the bit was there to be changed.
  bool struck() const {
    return flip_.where == FlipWhere::messages ? due_ && !witness_.is_planted() : struck_;
  }

 private:
  void strike_state();
  void strike_gradients(std::optional<int> group);
  void strike_kept(const Stage::Saved& saved);
  // The bit among those of all of them; none where they have none.
  void strike(const std::vector<Tensor>& all);
  void strike(const Tensor& tensor, std::uint64_t bit);

  const PlantedFlip flip_;
  const ParameterStore* parameters_ = nullptr;
  Witness& witness_;
  bool due_ = false, struck_ = false;
};

}  // namespace echelon
