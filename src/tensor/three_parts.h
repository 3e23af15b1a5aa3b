// f32 operands as sums of three bf16, for processors that multiply bf16 many times as fast as f32 (Henry,
// Tang & Heinecke 2019, https://arxiv.org/abs/1904.06376). Rounding x to the 8 bits of a bf16, then what is
// left of it, then what is left of that, takes all 24 bits of an f32: x is their sum exactly. Of the nine
// products of two operands' parts, three are left out: the middle times the smallest, and the smallest times
// itself. Each of these is at most 2^-24 of the product, so a sum of k terms is as close as one of k + 2
// terms in f32 arithmetic, in any order.
//
// At the ends of the range it is not f32 arithmetic: parts below 2^-126, and products and sums of parts, are
// 0, so operands and results below some 2^-102 have fewer digits; an operand that is infinite, or rounds to
// it (above 3.39e38), gives NaN.
#pragma once

#include <cstdint>
#include <type_traits>

namespace echelon {

inline constexpr int parts_of_f32 = 3;

// Which products are summed, as the parts of a and b (0 is the largest); from one to the next, few parts are
// loaded again.
struct PartProduct {
  int a, b;
};
inline constexpr PartProduct part_products[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};

// Packing as by MatmulPasses, with words of two bf16: each 16 words of lines' largest parts are followed by
// 16 of their middle and 16 of their smallest parts, as if these were consecutive along k. Zeros follow the
// end of a line, up to a multiple of 16 words.
struct PartPasses {
  using Size = std::int64_t;
  void (*words_along)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*words_across)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*groups_along)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
  void (*groups_across)(const float* x, Size stride, Size lines, Size k, Size width, std::uint32_t* to);
};

// For templates of what computes in f32 by parts, beside float and bf16; what they read and write is float.
struct ThreeParts {};
template <class T>
using ElementOf = std::conditional_t<std::is_same_v<T, ThreeParts>, float, T>;

// By AVX-512, for panels of 32 lines; null if the processor lacks it.
const PartPasses* avx512_part_passes();

}  // namespace echelon
