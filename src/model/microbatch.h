#pragma once

#include <cstdint>
#include <functional>

#include "base/split.h"
#include "parallel/context_parallel.h"
#include "tensor/tensor.h"

namespace echelon {

// Writes the `seq_len` tokens and targets of one sample; negative targets are ignored. A sample that knows
// where its documents begin marks their first tokens by begins_document, its own first token included;
// otherwise a document mask uses the token that ends a document. The result depends only on (step, sample)
// and fixed data.
using SampleSource =
    std::function<void(std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets)>;

// A rank's tokens of some sequences: N = batch * tokens per sequence here. Rows go sequence by sequence, each
// in the order of ContextLayout::positions.
struct Microbatch {
  Tensor tokens;        // (N, i32)
  Tensor targets;       // (N, i32): the next token; negative = ignored
  Tensor positions;     // (N, i32), within their sequences
  // For multi-token prediction: the next token of each row, whether or not it is a target, and its target (N,
  // i32). Undefined for other models and in generation.
  Tensor next_tokens = {}, next_targets = {};
  Sequences sequences;  // as attention sees them
  // For models with a state space: as sequences.first_positions, but for whole sequences, if attention has
  // only parts of them. Otherwise undefined.
  Tensor whole_starts = {};
  // As sequences.first_positions, for layers with the model's window; undefined if it has none.
  Tensor window_starts = {};
  std::int64_t step = 0, first_sample = 0;
  std::int64_t num_targets = 0;  // not ignored
  int index = 0;                 // among the rank's microbatches of a step
  std::int64_t rows() const { return tokens.numel(); }
};

// The first position that a token at `position` sees, in a document that begins at `start`.
std::int32_t first_in_window(std::int64_t position, std::int64_t window, std::int32_t start = 0);

// Loads samples of a step, with what the plan's mask needs to know of them.
Microbatch load_microbatch(const Rank& rank, const Plan& plan, std::int64_t step, Range samples,
                           const SampleSource& source);

}  // namespace echelon
