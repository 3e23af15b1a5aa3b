#pragma once

#include "tensor/tensor.h"

namespace echelon {

// The tokens of some whole sequences: rows are (sequence, position) in that order, N = batch * seq_len of
// them.
struct Microbatch {
  std::int64_t batch = 0, seq_len = 0;
  Tensor tokens;   // (N, i32)
  Tensor targets;  // (N, i32): the next token; negative = ignored
  std::int64_t rows() const { return batch * seq_len; }
};

}  // namespace echelon
