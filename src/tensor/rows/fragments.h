// Products of matrices of bf16 by the 32 lanes of a warp, who hold them together: each lane a fragment, of
// the form that tensor cores take (PTX ISA, mma.m16n8k16). Where an element lies is said here and nowhere
// else; the instructions are functions of the team's warp, by PTX on a device (tensor/cuda/cuda_warp.cuh) and
// played in C++ in tests (tests/emulated_launch.h):
//   multiply(sums, left, right)          sums += left right
//   load(row, to), load_turned(row, to)  four matrices of 8 x 8 in shared memory, or their transposes: lane
//                                        8 i + r says where row r of matrix i begins, at a multiple of 16
//                                        bytes, and gets elements (lane / 4, 2 (lane % 4)) and its right
//                                        neighbour of each of them
//   across(x, apart)                     the x of the lane whose number differs from one's own by that bit
//   pair(x, y)                           two floats as bf16 in one word, x in the lower half
//   power_of_two(x), reciprocal(x)       2^x, 1 / x, to two units of the last place or so
//   copy_later(to, from)                 16 bytes to shared memory, there after arrive()
//   arrive()                             waits for this lane's own copies; others see them after a sync()
//   number(), count()                    of the warps of a block
//   lane()                               in the warp
// All lanes of a warp come to each of the first three.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "tensor/rows/team.h"

// Before a loop over fragments: an index known to the compiler keeps them in registers.
#ifdef __CUDA_ARCH__  // the host's compiler, which nvcc runs too, knows no such thing
#define ECHELON_UNROLL _Pragma("unroll")
#else
#define ECHELON_UNROLL
#endif

namespace echelon::rows {

inline constexpr int warp_lanes = 32;

// Of 16 x 16 elements, two neighbours of a row in each word: those in row lane / 4 and column 2 (lane % 4), 8
// rows below, 8 columns to the right, and both.
struct LeftFragment {
  std::uint32_t words[4];
};
// Of 16 x 8 elements, two neighbours of a column in each word: those in column lane / 4 and row 2 (lane % 4),
// and 8 rows below.
struct RightFragment {
  std::uint32_t words[2];
};
// Of 16 x 8 sums, as a left fragment's first 8 columns: two in row lane / 4, two 8 rows below.
struct SumFragment {
  float sums[4];
};
ECHELON_HOST_DEVICE constexpr int fragment_row(int lane, int element) { return lane / 4 + element / 2 * 8; }
ECHELON_HOST_DEVICE constexpr int fragment_column(int lane, int element) {
  return lane % 4 * 2 + element % 2;
}

// body(i, half) for the two rows that a lane has of each strip of 16; fragment_row(lane, 2 half) of them.
template <int strips, class Body>
ECHELON_HOST_DEVICE void each_row_of_sums(const Body& body) {
  ECHELON_UNROLL
  for (int i = 0; i < strips; ++i) {
    body(i, 0);
    body(i, 1);
  }
}
// body(j, e) for what a lane has of such a row: sum e of fragment j.
template <int fragments, class Body>
ECHELON_HOST_DEVICE void each_sum_of_row(int half, const Body& body) {
  ECHELON_UNROLL
  for (int j = 0; j < fragments; ++j) {
    body(j, 2 * half);
    body(j, 2 * half + 1);
  }
}
// body(j, e, column) for the first of each two of them that stand in one of the first `width` columns, an
// even number.
template <int fragments, class Body>
ECHELON_HOST_DEVICE void each_pair_of_row(int half, int width, int lane, const Body& body) {
  ECHELON_UNROLL
  for (int j = 0; j < fragments; ++j) {
    const int column = 8 * j + fragment_column(lane, 2 * half);
    if (column < width) body(j, 2 * half, column);
  }
}
// body(i, j, e) for all of them.
template <int strips, int fragments, class Body>
ECHELON_HOST_DEVICE void each_sum(const Body& body) {
  each_row_of_sums<strips>(
      [&](int i, int half) { each_sum_of_row<fragments>(half, [&](int j, int e) { body(i, j, e); }); });
}

// Rows of a head in shared memory, so far apart that 16 bytes of any eight neighbours lie in different banks:
// an odd number of times 16 bytes.
struct SharedRows {
  bf16* data;
  int stride;
  ECHELON_HOST_DEVICE bf16* at(int row, int column) const { return data + row * stride + column; }
  static constexpr int stride_of(int padded_width) { return padded_width + 8; }
};

// Elements [row, row + 16) x [depth, depth + 16) of x.
template <class Warp>
ECHELON_HOST_DEVICE LeftFragment left_fragment(const Warp& warp, const SharedRows& x, int row, int depth) {
  LeftFragment f;
  warp.load(x.at(row + warp.lane() % 16, depth + warp.lane() / 16 * 8), f.words);
  return f;
}
// Of two right operands beside each other, 16 x 16: x turned, whose rows [column, column + 16) are the
// operands' columns, or x itself, whose rows [depth, depth + 16) are theirs.
struct RightPair {
  RightFragment halves[2];
};
template <class Warp>
ECHELON_HOST_DEVICE RightPair right_of_turned(const Warp& warp, const SharedRows& x, int column, int depth) {
  const int lane = warp.lane();
  std::uint32_t words[4];
  warp.load(x.at(column + lane / 16 * 8 + lane % 8, depth + lane / 8 % 2 * 8), words);
  return {{{{words[0], words[1]}}, {{words[2], words[3]}}}};
}
template <class Warp>
ECHELON_HOST_DEVICE RightPair right_of(const Warp& warp, const SharedRows& x, int depth, int column) {
  const int lane = warp.lane();
  std::uint32_t words[4];
  warp.load_turned(x.at(depth + lane % 16, column + lane / 16 * 8), words);
  return {{{{words[0], words[1]}}, {{words[2], words[3]}}}};
}
// Sums of 16 x 16, two fragments beside each other, as a left operand: each lane has what it needs.
template <class Warp>
ECHELON_HOST_DEVICE LeftFragment left_of_sums(const Warp& warp, const SumFragment* two) {
  return {{warp.pair(two[0].sums[0], two[0].sums[1]), warp.pair(two[0].sums[2], two[0].sums[3]),
           warp.pair(two[1].sums[0], two[1].sums[1]), warp.pair(two[1].sums[2], two[1].sums[3])}};
}

// sums (16 `strips` x `wide`) += rows of left, from `row` on, times the transpose of right's first `wide`
// rows, over `depth` columns of both, a multiple of 16.
template <int strips, int wide, class Warp>
ECHELON_HOST_DEVICE void add_product_of_turned(const Warp& warp, const SharedRows& left, int row,
                                               const SharedRows& right, int depth,
                                               SumFragment (&sums)[strips][wide / 8]) {
  ECHELON_UNROLL
  for (int d = 0; d < depth; d += 16) {
    LeftFragment a[strips];
    ECHELON_UNROLL
    for (int i = 0; i < strips; ++i) a[i] = left_fragment(warp, left, row + 16 * i, d);
    ECHELON_UNROLL
    for (int j = 0; j < wide / 16; ++j) {
      const RightPair b = right_of_turned(warp, right, 16 * j, d);
      ECHELON_UNROLL
      for (int i = 0; i < strips; ++i) {
        warp.multiply(sums[i][2 * j], a[i], b.halves[0]);
        warp.multiply(sums[i][2 * j + 1], a[i], b.halves[1]);
      }
    }
  }
}

// sums (16 `strips` x `columns`) += weights (16 `strips` x `depth`), rounded to bf16, times the first `depth`
// rows of right, of whose columns those from `column` on that are below `width`, a multiple of 16.
template <int strips, int depth, int columns, class Warp>
ECHELON_HOST_DEVICE void add_product_of_weights(const Warp& warp,
                                                const SumFragment (&weights)[strips][depth / 8],
                                                const SharedRows& right, int column, int width,
                                                SumFragment (&sums)[strips][columns / 8]) {
  ECHELON_UNROLL
  for (int d = 0; d < depth / 16; ++d) {
    LeftFragment a[strips];
    ECHELON_UNROLL
    for (int i = 0; i < strips; ++i) a[i] = left_of_sums(warp, &weights[i][2 * d]);
    ECHELON_UNROLL
    for (int j = 0; j < columns / 16; ++j) {
      if (column + 16 * j >= width) continue;
      const RightPair b = right_of(warp, right, 16 * d, column + 16 * j);
      ECHELON_UNROLL
      for (int i = 0; i < strips; ++i) {
        warp.multiply(sums[i][2 * j], a[i], b.halves[0]);
        warp.multiply(sums[i][2 * j + 1], a[i], b.halves[1]);
      }
    }
  }
}

// Rows [row, row + rows) and columns [col, col + width) of m, on their way to shared memory 16 bytes at a
// time, and zeros in what is left of its `all_rows` rows of `padded` elements.
template <class Team>
ECHELON_HOST_DEVICE void fetch_rows(const Team& team, const Matrix<bf16>& m, std::int64_t row,
                                    std::int64_t col, int rows, int width, const SharedRows& to, int all_rows,
                                    int padded) {
  struct alignas(16) Piece {
    bf16 elements[8];
  };
  const int pieces = padded / 8, lane = static_cast<int>(team.lane()), lanes = static_cast<int>(team.lanes());
  if (rows == all_rows && width == padded && all_rows * pieces % lanes == 0 && lanes % pieces == 0) {
    // All are there, and a lane keeps to its columns.
    const int step = lanes / pieces, first = lane / pieces, d = lane % pieces * 8;
    const bf16* from = m[row + first] + col + d;
    const std::int64_t apart = step * m.stride;
    ECHELON_UNROLL
    for (int i = 0; i < all_rows; i += step, from += apart) team.warp().copy_later(to.at(first + i, d), from);
    return;
  }
#ifdef __CUDA_ARCH__  // seldom: short code rather than fast
#pragma unroll 1
#endif
  for (int e = lane; e < all_rows * pieces; e += lanes) {
    const int i = e / pieces, d = e % pieces * 8;
    if (i < rows && d < width)
      team.warp().copy_later(to.at(i, d), m[row + i] + col + d);
    else
      *reinterpret_cast<Piece*>(to.at(i, d)) = Piece{};
  }
}

// Two neighbours of a row, 4 bytes at once.
template <class Warp>
ECHELON_HOST_DEVICE void store_pair(const Warp& warp, float x, float y, bf16* to) {
  struct alignas(4) Pair {
    bf16 x, y;
  };
  const std::uint32_t word = warp.pair(x, y);
  *reinterpret_cast<Pair*>(to) = {bf16::of_bits(static_cast<std::uint16_t>(word)),
                                  bf16::of_bits(static_cast<std::uint16_t>(word >> 16))};
}

}  // namespace echelon::rows
