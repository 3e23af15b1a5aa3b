// Products of bf16 matrices by the 32 lanes of a warp, which hold them together: each lane holds a fragment
// in the form that tensor cores take (PTX ISA, mma.m16n8k16). Only this file defines where an element lies.
// The instructions are functions of the team's warp, by PTX on a device (tensor/cuda/cuda_warp.cuh) and
// emulated in C++ in tests (tests/emulated_launch.h):
//   multiply(sums, left, right)          sums += left right
//   load(row, to), load_turned(row, to)  four matrices of 8 x 8 in shared memory, or their transposes: lane
//                                        8 i + r gives the address of row r of matrix i, a multiple of 16
//                                        bytes, and gets elements (lane / 4, 2 (lane % 4)) of each matrix
//                                        and their right neighbours
//   across(x, apart)                     x of the lane whose number differs from this lane's by that bit
//   pair(x, y)                           two floats as bf16 in one word, x in the lower half
//   power_of_two(x), reciprocal(x)       2^x, 1 / x, to about two units in the last place
//   copy_later(to, from, is)             copies 16 bytes, or zeros if not `is`, to shared memory; complete
//                                        after arrive()
//   meet()                               what the warp's lanes wrote before is visible to all of them after
//   arrive()                             waits for this lane's own copies; others see them after a sync()
//   number(), count()                    of the warps of a block
//   lane()                               in the warp
// All lanes of a warp must call each of the first three, and meet().
//
// Four neighbouring warps, the first with a number that is a multiple of four, are a warpgroup. If the device
// has them (has_warpgroups), a warpgroup multiplies 64 rows, 16 for each warp, by operands in shared memory,
// which is read once for the four warps (PTX ISA, wgmma):
//   begin_products(registers...)         operands and sums in registers are ready;
//   end_products(sums...)                before this, none of them may be touched
//   multiply_turned<wide>(first, sums, left, row, right, column, depth)
//                                        left times what right_of_turned reads, of `wide` rows (32 or 64)
//                                        from `column` on, a multiple of 8
//   multiply_rows<wide>(first, sums, left, right, depth, column)
//                                        left times what right_of reads, of `wide` columns from `column`
//                                        on, a multiple of 64
// where left is a fragment, or for the first one rows in shared memory: the warpgroup's rows begin at a
// multiple of 64, and `row` is the first of this warp's. The sums are set to the product, or added to if not
// `first`. All lanes of the four warps must call each.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "tensor/rows/team.h"

// ECHELON_UNROLL goes before a loop over fragments: with constant indices they stay in registers.
// ECHELON_UNROLL_TWICE goes before a loop with long iterations that does not need this: unrolled completely,
// it would not fit into the instruction cache.
#ifdef __CUDA_ARCH__  // the host's compiler, which nvcc runs too, does not know these
#define ECHELON_UNROLL _Pragma("unroll")
#define ECHELON_UNROLL_TWICE _Pragma("unroll 2")
#else
#define ECHELON_UNROLL
#define ECHELON_UNROLL_TWICE
#endif

namespace echelon::rows {

inline constexpr int warp_lanes = 32;

// 16 x 16 elements, two neighbours of a row in each word: those in row lane / 4 and column 2 (lane % 4), 8
// rows below, 8 columns to the right, and both.
struct LeftFragment {
  std::uint32_t words[4];
};
// 16 x 8 elements, two neighbours of a column in each word: those in column lane / 4 and row 2 (lane % 4),
// and 8 rows below.
struct RightFragment {
  std::uint32_t words[2];
};
// 16 x 8 sums, laid out like a left fragment's first 8 columns: two in row lane / 4, two 8 rows below.
struct SumFragment {
  float sums[4];
};
ECHELON_HOST_DEVICE constexpr int fragment_row(int lane, int element) { return lane / 4 + element / 2 * 8; }
ECHELON_HOST_DEVICE constexpr int fragment_column(int lane, int element) {
  return lane % 4 * 2 + element % 2;
}

// Calls body(i, half) for the two rows that a lane has of each strip of 16; their row is fragment_row(lane, 2
// half).
template <int strips, class Body>
ECHELON_HOST_DEVICE void each_row_of_sums(const Body& body) {
  ECHELON_UNROLL
  for (int i = 0; i < strips; ++i) {
    body(i, 0);
    body(i, 1);
  }
}
// Calls body(j, e) for what a lane has of such a row: sum e of fragment j.
template <int fragments, class Body>
ECHELON_HOST_DEVICE void each_sum_of_row(int half, const Body& body) {
  ECHELON_UNROLL
  for (int j = 0; j < fragments; ++j) {
    body(j, 2 * half);
    body(j, 2 * half + 1);
  }
}
// Calls body(j, e, column) for the first of each pair of them, in the first `width` columns (an even number).
template <int fragments, class Body>
ECHELON_HOST_DEVICE void each_pair_of_row(int half, int width, int lane, const Body& body) {
  ECHELON_UNROLL
  for (int j = 0; j < fragments; ++j) {
    const int column = 8 * j + fragment_column(lane, 2 * half);
    if (column < width) body(j, 2 * half, column);
  }
}
// Calls body(i, j, e) for all sums.
template <int strips, int fragments, class Body>
ECHELON_HOST_DEVICE void each_sum(const Body& body) {
  each_row_of_sums<strips>(
      [&](int i, int half) { each_sum_of_row<fragments>(half, [&](int j, int e) { body(i, j, e); }); });
}

// Rows in shared memory, a multiple of eight, in panels of 64 columns, 128 bytes per row, in which the 16
// bytes with index c are stored at index c xor row, modulo 8. So the same columns of eight neighbouring rows
// are in different banks, and warpgroups can multiply such rows (PTX ISA, 128-byte swizzling) if they begin
// at a multiple of 1,024 bytes.
struct SharedRows {
  using Element = bf16;
  static constexpr int panel = 64;

  bf16* data;
  int rows;
  // Contiguous from there up to the next multiple of 8 columns.
  ECHELON_HOST_DEVICE bf16* at(int row, int column) const {
    return data + column / panel * rows * panel + row * panel + ((column / 8 ^ row) & 7) * 8 + column % 8;
  }
  ECHELON_HOST_DEVICE static constexpr int elements(int rows, int width) {
    return rows * ((width + panel - 1) / panel * panel);
  }
};

// A block's shared memory, handed out from its beginning.
class SharedRoom {
 public:
  static constexpr std::size_t bytes_for(int rows, int width) {
    return sizeof(bf16) * static_cast<std::size_t>(SharedRows::elements(rows, width));
  }
  ECHELON_HOST_DEVICE explicit SharedRoom(std::byte* shared) : next_(reinterpret_cast<bf16*>(shared)) {}
  ECHELON_HOST_DEVICE SharedRows take(int rows, int width) {
    const SharedRows taken{next_, rows};
    next_ += SharedRows::elements(rows, width);
    return taken;
  }
  // The memory after what has been taken.
  ECHELON_HOST_DEVICE void* rest() const { return next_; }

 private:
  bf16* next_;
};

// Elements [row, row + 16) x [depth, depth + 16) of x.
template <class Warp>
ECHELON_HOST_DEVICE LeftFragment left_fragment(const Warp& warp, const SharedRows& x, int row, int depth) {
  LeftFragment f;
  warp.load(x.at(row + warp.lane() % 16, depth + warp.lane() / 16 * 8), f.words);
  return f;
}
// Two right operands beside each other, 16 x 16: x transposed, whose rows [column, column + 16) are the
// operands' columns; or x itself, whose rows [depth, depth + 16) are theirs.
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
// Two neighbouring fragments of sums, 16 x 16, as a left operand: each lane already has what it needs.
template <class Warp>
ECHELON_HOST_DEVICE LeftFragment left_of_sums(const Warp& warp, const SumFragment* two) {
  return {{warp.pair(two[0].sums[0], two[0].sums[1]), warp.pair(two[0].sums[2], two[0].sums[3]),
           warp.pair(two[1].sums[0], two[1].sums[1]), warp.pair(two[1].sums[2], two[1].sums[3])}};
}

// A warp that multiplies alone, even if the device has warpgroups.
template <class Warp>
struct Alone : Warp {
  static constexpr bool has_warpgroups = false;
};
template <bool together, class Team>
ECHELON_HOST_DEVICE auto warp_of(const Team& team) {
  if constexpr (together)
    return team.warp();
  else
    return Alone<decltype(team.warp())>{team.warp()};
}

// Rows of a block: 16 `strips` for each warp.
ECHELON_HOST_DEVICE constexpr int rows_of_block(std::int64_t lanes, int strips) {
  return static_cast<int>(lanes) / warp_lanes * 16 * strips;
}
// The rows that are multiplied together: a warp's, or a warpgroup's.
struct RowsTogether {
  int begin, end;
};
template <int strips, class Warp>
ECHELON_HOST_DEVICE RowsTogether rows_together(const Warp& warp) {
  constexpr int warps = Warp::has_warpgroups ? 4 : 1, rows = warps * 16 * strips;
  const int begin = warp.number() / warps * rows;
  return {begin, begin + rows};
}

template <class Warp, class... Registers>
ECHELON_HOST_DEVICE void begin_products(const Warp& warp, Registers&... registers) {
  if constexpr (Warp::has_warpgroups) warp.begin_products(registers...);
}
template <class Warp, class... Sums>
ECHELON_HOST_DEVICE void end_products(const Warp& warp, Sums&... sums) {
  if constexpr (Warp::has_warpgroups) warp.end_products(sums...);
}

// sums (16 `strips` x `wide`) = rows of left, from `row` on, times the transpose of right's first `wide`
// rows, over `depth` columns of both. Call between begin_products() and end_products().
template <int strips, int wide, int depth, class Warp>
ECHELON_HOST_DEVICE void product_of_turned(const Warp& warp, const SharedRows& left, int row,
                                           const SharedRows& right, SumFragment (&sums)[strips][wide / 8]) {
  if constexpr (Warp::has_warpgroups) {
    static_assert(strips == 1, "rows of a warpgroup's that stay in shared memory are neighbours");
    constexpr int at_once = wide % 64 == 0 ? 64 : 32;
    ECHELON_UNROLL
    for (int j = 0; j < wide; j += at_once) {
      warp.template multiply_turned<at_once>(true, &sums[0][j / 8], left, row, right, j, 0);
      ECHELON_UNROLL
      for (int d = 16; d < depth; d += 16)
        warp.template multiply_turned<at_once>(false, &sums[0][j / 8], left, row, right, j, d);
    }
  } else {
    each_sum<strips, wide / 8>([&](int i, int j, int e) { sums[i][j].sums[e] = 0; });
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
}

// A warp's sums of 16 `strips` rows, rounded to bf16, as a left operand.
template <int strips, int depth>
struct Weights {
  LeftFragment all[strips][depth / 16];

  template <class Warp>
  ECHELON_HOST_DEVICE Weights(const Warp& warp, const SumFragment (&sums)[strips][depth / 8]) {
    ECHELON_UNROLL
    for (int i = 0; i < strips; ++i) {
      ECHELON_UNROLL
      for (int d = 0; d < depth / 16; ++d) all[i][d] = left_of_sums(warp, &sums[i][2 * d]);
    }
  }
};

// sums (16 `strips` x `columns`) += weights (16 `strips` x `depth`) times the first `depth` rows of right,
// from `column` on, a multiple of 64. Call between begin_products() and end_products().
template <int strips, int depth, int columns, class Warp>
ECHELON_HOST_DEVICE void add_product_of_weights(const Warp& warp, const Weights<strips, depth>& weights,
                                                const SharedRows& right, int column,
                                                SumFragment (&sums)[strips][columns / 8]) {
  if constexpr (Warp::has_warpgroups) {
    static_assert(strips == 1);
    constexpr int wide = SharedRows::panel;
    ECHELON_UNROLL
    for (int j = 0; j < columns / wide; ++j) {
      ECHELON_UNROLL
      for (int d = 0; d < depth / 16; ++d)
        warp.template multiply_rows<wide>(false, &sums[0][wide / 8 * j], weights.all[0][d], right, 16 * d,
                                          column + wide * j);
    }
  } else {
    ECHELON_UNROLL
    for (int d = 0; d < depth / 16; ++d) {
      ECHELON_UNROLL
      for (int j = 0; j < columns / 16; ++j) {
        const RightPair b = right_of(warp, right, 16 * d, column + 16 * j);
        ECHELON_UNROLL
        for (int i = 0; i < strips; ++i) {
          warp.multiply(sums[i][2 * j], weights.all[i][d], b.halves[0]);
          warp.multiply(sums[i][2 * j + 1], weights.all[i][d], b.halves[1]);
        }
      }
    }
  }
}

// A head's columns in a matrix, which a block copies to shared memory, 16 bytes per lane: for bf16, eight
// lanes copy a panel's row, the next eight the next row. Columns up to `width` beyond the head are zeros.
template <int width, class Rows = SharedRows>
class HeadColumns {
  using T = typename Rows::Element;

 public:
  template <class Team>
  ECHELON_HOST_DEVICE HeadColumns(const Team& team, const Matrix<T>& m, std::int64_t column, int head_dim)
      : row_(static_cast<int>(team.lane()) / lanes_of_row),
        place_(static_cast<int>(team.lane()) % lanes_of_row * at_once),
        left_(head_dim - place_),
        from_(m.data + row_ * m.stride + column + place_),
        stride_(m.stride) {}

  // Copies rows [row, row + rows) of the matrix, and zeros for the rest of `all_rows`; for the head that
  // begins `further` columns later.
  template <class Team>
  ECHELON_HOST_DEVICE void fetch(const Team& team, std::int64_t row, int rows, const Rows& to, int all_rows,
                                 std::int64_t further = 0) const {
    const int step = static_cast<int>(team.lanes()) / lanes_of_row;
    const T* from = from_ + row * stride_ + further;
    ECHELON_UNROLL
    for (int i = 0; i < all_rows; i += step, from += step * stride_) {
      ECHELON_UNROLL
      for (int p = 0; p < width; p += Rows::panel)
        team.warp().copy_later(to.at(row_ + i, p + place_), from + p, row_ + i < rows && p < left_);
    }
  }

 private:
  static constexpr int at_once = 16 / sizeof(T), lanes_of_row = Rows::panel / at_once;
  int row_, place_, left_;
  const T* from_;
  std::int64_t stride_;
};

// Two neighbours of a row, stored as 4 bytes.
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
