// The form of a kernel that runs on the host and on devices: a function object that does one block of the
// work, kernel(team). The team is the lanes that share a block:
//   block()          which block
//   lane(), lanes()  which lane, and how many there are: each takes every n-th element
//   sync()           what the lanes wrote before is visible to all of them after
//   reduce(x, op)    combines x over all lanes, grouped only by their number; every lane gets the result
//   shared()         memory of the block, as many bytes as the launch requested, aligned to 16; with warps,
//                    to 1,024
// All lanes of a block must call each sync() and reduce(). No sum uses atomics: the same launch gives the
// same bits.
//
// On the host a team is one lane, which does everything in the order of the indices: the reference kernels.
// On a device it is a thread block (tensor/cuda/).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace echelon::rows {

class OneLane {
 public:
  explicit OneLane(std::int64_t block, std::byte* shared = nullptr) : block_(block), shared_(shared) {}
  std::int64_t block() const { return block_; }
  static constexpr std::int64_t lane() { return 0; }
  static constexpr std::int64_t lanes() { return 1; }
  static constexpr void sync() {}
  template <class X, class Op>
  static constexpr X reduce(X x, const Op&) {
    return x;
  }
  std::byte* shared() const { return shared_; }

 private:
  std::int64_t block_;
  std::byte* shared_;
};

struct Plus {
  template <class X>
  ECHELON_HOST_DEVICE X operator()(X a, X b) const {
    return a + b;
  }
};
// As std::max.
struct Larger {
  template <class X>
  ECHELON_HOST_DEVICE X operator()(X a, X b) const {
    return a < b ? b : a;
  }
};
template <class Team, class X>
ECHELON_HOST_DEVICE X sum_of(const Team& team, X x) {
  return team.reduce(x, Plus());
}
template <class Team, class X>
ECHELON_HOST_DEVICE X largest_of(const Team& team, X x) {
  return team.reduce(x, Larger());
}
template <class Team>
ECHELON_HOST_DEVICE bool any_of(const Team& team, bool holds) {
  return team.reduce(holds ? 1 : 0, Larger()) != 0;
}

// m[row][column]; rows may be further apart than they are long.
template <class T>
struct Matrix {
  T* data;
  std::int64_t rows, cols, stride;
  ECHELON_HOST_DEVICE T* operator[](std::int64_t row) const { return data + row * stride; }
};

// Calls visit(column, elements, count) for a lane's elements of a row, several at once: `count` of them, the
// first at `column`, each as many columns after the one before as there are lanes. They are read before the
// first visit, so that a visit's writes, which might alias the next reads, delay none of them. In order, or
// from the last group to the first: the end of a row that has just been read is in a cache.
template <bool backwards = false, class Team, class T, class Visit>
ECHELON_HOST_DEVICE void groups_of_row(const Team& team, const T* row, std::int64_t cols,
                                       const Visit& visit) {
  constexpr int at_once = 64 / sizeof(T);
  const std::int64_t step = at_once * team.lanes(), first = team.lane();
  const std::int64_t mine = first < cols ? (cols - first + team.lanes() - 1) / team.lanes() : 0;
  const std::int64_t whole = mine / at_once;
  const int left = static_cast<int>(mine % at_once);
  T elements[at_once];
  const auto visit_rest = [&] {
    if (left == 0) return;
    const std::int64_t begin = first + whole * step;
    for (int k = 0; k < at_once; ++k) elements[k] = k < left ? row[begin + k * team.lanes()] : T{};
    visit(begin, elements, left);
  };
  if (backwards) visit_rest();
  for (std::int64_t g = 0; g < whole; ++g) {
    const std::int64_t begin = first + (backwards ? whole - 1 - g : g) * step;
    for (int k = 0; k < at_once; ++k) elements[k] = row[begin + k * team.lanes()];
    visit(begin, elements, at_once);
  }
  if (!backwards) visit_rest();
}
// Calls visit(column, element) for each of them.
template <class Team, class T, class Visit>
ECHELON_HOST_DEVICE void each_of_row(const Team& team, const T* row, std::int64_t cols, const Visit& visit) {
  groups_of_row(team, row, cols, [&]<int N>(std::int64_t begin, const T(&elements)[N], int count) {
    for (int k = 0; k < N; ++k)
      if (k < count) visit(begin + k * team.lanes(), elements[k]);
  });
}

// Calls body(team, row): a block for each row.
template <class Body>
struct EachRow {
  Body body;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    body(team, team.block());
  }
};

// The last index whose number x has reached, of `count` numbers at(0) < at(1) < ...; x has reached the first.
template <class At>
ECHELON_HOST_DEVICE std::int64_t last_reached(std::int64_t x, std::int64_t count, const At& at) {
  std::int64_t begin = 0, end = count;  // the result is in [begin, end)
  while (end - begin > 1) {
    const std::int64_t middle = begin + (end - begin) / 2;
    (at(middle) <= x ? begin : end) = middle;
  }
  return begin;
}

// The blocks of a launch from `first` on, renumbered from 0.
template <class Team>
class BlocksFrom : public Team {
 public:
  ECHELON_HOST_DEVICE BlocksFrom(const Team& team, std::int64_t first) : Team(team), first_(first) {}
  ECHELON_HOST_DEVICE std::int64_t block() const { return Team::block() - first_; }

 private:
  std::int64_t first_;
};

// Several kernels of one kind in one launch, one's blocks after another's: as many as fit into a launch's
// arguments.
template <class Kernel>
struct Together {
  static constexpr int most = 4000 / (sizeof(Kernel) + sizeof(std::int64_t));
  Kernel kernels[most];
  std::int64_t first_blocks[most];  // the first is 0
  std::int64_t count = 0;

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t i =
        last_reached(team.block(), count, [this](std::int64_t k) { return first_blocks[k]; });
    kernels[i](BlocksFrom<Team>(team, first_blocks[i]));
  }
};

// Calls body(row, column): a block for each `piece` columns of a row. Kernels that move many bytes take
// several columns at once instead (rows/columns.h).
template <class Body>
struct EachElement {
  Body body;
  std::int64_t cols, piece;
  ECHELON_HOST_DEVICE static std::int64_t pieces(std::int64_t cols, std::int64_t piece) {
    return (cols + piece - 1) / piece;
  }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t each = pieces(cols, piece), row = team.block() / each;
    const std::int64_t begin = team.block() % each * piece, end = begin + piece < cols ? begin + piece : cols;
    for (std::int64_t j = begin + team.lane(); j < end; j += team.lanes()) body(row, j);
  }
};

}  // namespace echelon::rows
