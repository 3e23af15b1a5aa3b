// Operands as the words that a MicroKernel reads, and how much of k is packed at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/split.h"
#include "tensor/matmul_product.h"
#include "tensor/matmul_simd.h"

namespace echelon {

// How many pieces of `width` cover `length`, and the largest multiple of `step` up to `most`, at least one.
inline std::int64_t pieces(std::int64_t length, std::int64_t width) { return (length + width - 1) / width; }
inline std::int64_t multiple_below(std::int64_t most, int step) {
  return std::max<std::int64_t>(most / step, 1) * step;
}

// How many elements of k are packed at once for such a c.
std::int64_t depth_of(const MicroKernel& kernel, DType c);
// What is packed at once of k, or of a range of its blocks, from `from` on: whole pairs of the kernel's
// depth, then what is left, in halves if it is deeper than one. oneDNN cuts k like this, too.
Range run_of_depth(const MicroKernel& kernel, DType c, Range all, std::int64_t from);

// The words that hold `elements` elements of a line; and those of its packed line, whose last may be zero.
std::int64_t filled_words(const MicroKernel& kernel, std::int64_t elements);
std::int64_t words_of(const MicroKernel& kernel, std::int64_t filled);

// How an operand is packed; indices: whether its lines run along k.
struct Packing {
  decltype(MatmulPasses::floats_along) floats[2];
  decltype(MatmulPasses::pairs_along) narrow[2];
  std::int64_t width;  // lines in a panel
  // Across k, this many elements of each panel are packed before more of the first.
  std::int64_t rows;
  bool pads;  // packing fills the last words with zeros itself
  std::int64_t parts = 1;
};

Packing packing_of_a(const MicroKernel& kernel);
Packing packing_of_b(const MicroKernel& kernel);

// Packs `lines` lines of op(x), from `line` on, over k, as panels with `words` words of each line, of which
// `filled` have elements; the others are zero. `along`: whether lines run along k in memory. May write one
// vector beyond the last panel.
void pack(const ConstPanel& x, bool along, const Packing& packing, std::int64_t line, std::int64_t lines,
          Range k, std::int64_t filled, std::int64_t words, std::uint32_t* to);

}  // namespace echelon
