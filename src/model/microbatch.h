#pragma once

#include <cstdint>
#include <functional>

#include "base/split.h"
#include "parallel/context_parallel.h"
#include "tensor/tensor.h"

namespace echelon {

// Writes the `seq_len` tokens and targets of one sample; a target below zero is ignored. A sample that knows
// where documents begin says so by begins_document, of its first token too; of others a document mask goes by
// the token that ends a document. Depends on (step, sample) and fixed data only.
using SampleSource =
    std::function<void(std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets)>;

// What a rank has of the tokens of some sequences: N = batch * tokens of each here rows, sequence by
// sequence, each in the order of ContextLayout::positions.
struct Microbatch {
  Tensor tokens;        // (N, i32)
  Tensor targets;       // (N, i32): the next token; negative = ignored
  Tensor positions;     // (N, i32) in their sequences
  // Of a model that predicts one more token, what lies one position on: (N, i32) the next token whether it
  // is a target or not, and its target. Undefined elsewhere, and in generation.
  Tensor next_tokens = {}, next_targets = {};
  Sequences sequences;  // as attention sees them
  // Of a model with a state space, which goes from position to position: the same of whole sequences, where
  // those of attention are not. Undefined elsewhere.
  Tensor whole_starts = {};
  // As sequences.first_positions, of layers with the model's window; undefined where it has none.
  Tensor window_starts = {};
  std::int64_t step = 0, first_sample = 0;
  std::int64_t num_targets = 0;  // that are not ignored
  int index = 0;                 // among those of the rank in a step
  std::int64_t rows() const { return tokens.numel(); }
};

// The first position that a token sees of a document that begins at `start`.
std::int32_t first_in_window(std::int64_t position, std::int64_t window, std::int32_t start = 0);

// The samples of a step, with whatever a plan's mask needs to know of them.
Microbatch load_microbatch(const Rank& rank, const Plan& plan, std::int64_t step, Range samples,
                           const SampleSource& source);

}  // namespace echelon
