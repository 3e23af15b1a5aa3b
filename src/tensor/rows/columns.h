// Passes over rows at the speed of a device's memory: a lane takes several neighbouring columns at once, as
// many as fit in 16 bytes, reads everything it needs of them, and then writes. A host's single lane takes one
// column after another.
//
// A body says how many columns it takes at most, whether its rows are aligned so that this many can be read
// at once, and processes some columns:
//   static constexpr int columns
//   bool is_aligned() const
//   body(row, Columns<n>), n = columns or 1
// Which columns belong to a lane depends only on the length of the row and the types, never on addresses.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/bf16.h"
#include "base/error.h"
#include "base/host_device.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// For elements stored as these types.
template <class... T>
inline constexpr int columns_of = [] {
  std::size_t largest = 1;
  ((largest = largest < sizeof(T) ? sizeof(T) : largest), ...);
  return static_cast<int>(16 / largest);
}();

// N consecutive elements in memory.
template <class T, int N>
struct alignas(N * sizeof(T)) Values {
  T of[N];
  ECHELON_HOST_DEVICE T operator[](int k) const { return of[k]; }
};
// Widened by one instruction each.
template <int N>
requires(N % 2 == 0) struct alignas(N * sizeof(bf16)) Values<bf16, N> {
  std::uint32_t pairs[N / 2];
  ECHELON_HOST_DEVICE float operator[](int k) const {
    return std::bit_cast<float>(k % 2 == 0 ? pairs[k / 2] << 16 : pairs[k / 2] & 0xffff0000u);
  }
};

// T(number(k)) for each k.
template <class T, int N, class Number>
ECHELON_HOST_DEVICE Values<T, N> make_values(const Number& number) {
  Values<T, N> values;
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
    for (int k = 0; k < N; k += 2)
      values.pairs[k / 2] = bf16(number(k)).bits | static_cast<std::uint32_t>(bf16(number(k + 1)).bits) << 16;
  } else {
    for (int k = 0; k < N; ++k) values.of[k] = T(number(k));
  }
  return values;
}

// N neighbouring columns. If N > 1, rows are aligned for them (are_aligned()).
template <int N>
struct Columns {
  static constexpr int count = N;
  std::int64_t begin;

  template <class T>
  ECHELON_HOST_DEVICE Values<T, N> read(const T* row) const {
#ifdef __CUDA_ARCH__
    return *reinterpret_cast<const Values<T, N>*>(row + begin);
#else
    Values<T, N> values;
    std::memcpy(&values, checked<T>(row + begin), sizeof values);
    return values;
#endif
  }
  // As read(), or `without` if row is null.
  template <class T>
  ECHELON_HOST_DEVICE Values<T, N> read_or(const T* row, Wide<T> without) const {
    return row == nullptr ? make_values<T, N>([&](int) { return without; }) : read(row);
  }
  template <class T>
  ECHELON_HOST_DEVICE void write(T* row, const Values<std::type_identity_t<T>, N>& values) const {
#ifdef __CUDA_ARCH__
    *reinterpret_cast<Values<T, N>*>(row + begin) = values;
#else
    std::memcpy(static_cast<void*>(const_cast<T*>(checked<T>(row + begin))), &values, sizeof values);
#endif
  }
  // Writes T(number(k)) for each k, and returns them.
  template <class T, class Number>
  requires std::is_invocable_v<Number, int> ECHELON_HOST_DEVICE Values<T, N> write(T* row,
                                                                                   const Number& number)
  const {
    const auto values = make_values<T, N>(number);
    write(row, values);
    return values;
  }

 private:
  template <class T>
  static const T* checked(const T* at) {
    if constexpr (N > 1)
      check(reinterpret_cast<std::uintptr_t>(at) % sizeof(Values<T, N>) == 0,
            "columns that are read at once are aligned");
    return at;
  }
};

template <int N, class T>
ECHELON_HOST_DEVICE bool is_aligned(const T* numbers) {
  return reinterpret_cast<std::uintptr_t>(numbers) % (N * sizeof(T)) == 0;
}
template <int N, class T>
ECHELON_HOST_DEVICE bool is_aligned(const Matrix<T>& m) {
  return is_aligned<N>(m.data) && (m.rows <= 1 || m.stride % N == 0);
}
// Whether N columns from a multiple of N on can be read at once from each row; null rows can.
template <int N, class... Rows>
ECHELON_HOST_DEVICE bool are_aligned(const Rows&... rows) {
  return (is_aligned<N>(rows) && ...);
}

// Visits columns [begin, begin + N) as far as a row of `cols` has them: at once if all exist and `whole`,
// else one by one.
template <int N, class Visit>
ECHELON_HOST_DEVICE void visit_columns(std::int64_t begin, std::int64_t cols, bool whole,
                                       const Visit& visit) {
  if (whole && begin + N <= cols) return visit(Columns<N>{begin});
  const std::int64_t end = begin + N < cols ? begin + N : cols;
#ifdef __CUDA_ARCH__  // rare: short code rather than fast code
#pragma unroll 1
#endif
  for (std::int64_t j = begin; j < end; ++j) visit(Columns<1>{j});
}

template <class Team>
inline constexpr bool takes_one_column = std::is_same_v<Team, OneLane>;

// n / divisor by a multiplication, for n < 2^31 (Granlund & Montgomery 1994).
class QuickDivision {
 public:
  static constexpr std::int64_t limit = std::int64_t{1} << 31;
  QuickDivision() = default;
  explicit QuickDivision(std::uint32_t divisor)
      : shift_(31 + static_cast<int>(std::bit_width(divisor - 1))),
        multiplier_(static_cast<std::uint32_t>((std::uint64_t{1} << shift_) / divisor + 1)) {}
  ECHELON_HOST_DEVICE std::uint32_t operator()(std::uint32_t n) const {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(n) * multiplier_ >> shift_);
  }

 private:
  int shift_ = 0;
  std::uint32_t multiplier_ = 0;
};

// Calls body(row, columns) for a whole matrix: runs of Body::columns columns are numbered across all rows,
// and each lane takes one. If a block has only one lane, it takes a row.
template <class Body>
class EachRun {
 public:
  EachRun() = default;
  EachRun(const Body& body, std::int64_t rows, std::int64_t cols)
      : body_(body),
        rows_(rows),
        cols_(cols),
        runs_((cols + Body::columns - 1) / Body::columns),
        all_runs_(rows * runs_),
        at_once_(body.is_aligned() ? cols / Body::columns : 0),
        is_small_(all_runs_ > 0 && all_runs_ < QuickDivision::limit),
        by_runs_(is_small_ ? static_cast<std::uint32_t>(runs_) : 1) {}
  std::int64_t num_blocks(std::int64_t lanes) const {
    return lanes == 1 ? rows_ : (all_runs_ + lanes - 1) / lanes;
  }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    if constexpr (takes_one_column<Team>) {
      for (std::int64_t j = 0; j < cols_; ++j) body_(team.block(), Columns<1>{j});
    } else {
      if (team.lanes() == 1) {
        for (std::int64_t run = 0; run < runs_; ++run) take(team.block(), run);
        return;
      }
      const std::int64_t run = team.block() * team.lanes() + team.lane();
      if (run >= all_runs_) return;
      const std::int64_t row = is_small_ ? by_runs_(static_cast<std::uint32_t>(run)) : run / runs_;
      take(row, run - row * runs_);
    }
  }

 private:
  ECHELON_HOST_DEVICE void take(std::int64_t row, std::int64_t run) const {
    const std::int64_t begin = run * Body::columns;
    if (run < at_once_) return body_(row, Columns<Body::columns>{begin});
#ifdef __CUDA_ARCH__  // rare: short code rather than fast code
#pragma unroll 1
#endif
    for (std::int64_t j = begin; j < cols_ && j < begin + Body::columns; ++j) body_(row, Columns<1>{j});
  }

  Body body_;
  std::int64_t rows_, cols_, runs_, all_runs_;
  std::int64_t at_once_;  // the number of a row's runs that are taken at once; the rest column by column
  bool is_small_;
  QuickDivision by_runs_;
};

// Whether a body is for EachRun, rather than EachElement.
template <class Body>
concept TakesColumns = requires {
  Body::columns;
};

// The columns of a row of `cols` columns that a lane takes: every n-th run of N. The first few runs can be
// kept in registers (KeptRow), so that a later pass need not read them again.
template <class Team, int N>
class LaneColumns {
 public:
  static constexpr int kept = takes_one_column<Team> ? 0 : 4;

  ECHELON_HOST_DEVICE LaneColumns(const Team& team, std::int64_t cols, bool whole)
      : first_(N * team.lane()), step_(N * team.lanes()), cols_(cols), whole_(whole) {}

  // Calls visit(columns, place) in order: `place` is their place in a KeptRow.
  template <class Visit>
  ECHELON_HOST_DEVICE void each(const Visit& visit) const {
    const auto elsewhere = [&](auto at) { visit(at, kept); };
    if constexpr (takes_one_column<Team>) {
      for (std::int64_t j = 0; j < cols_; ++j) elsewhere(Columns<1>{j});
    } else {
      std::int64_t begin = first_;
      if (whole_) {
        each_kept(visit);
        begin += kept * step_;
        if (const std::int64_t at_end = first_of_rest(); at_end < begin) begin = at_end;
      }
      for (; begin < cols_; begin += step_) visit_columns<N>(begin, cols_, whole_, elsewhere);
    }
  }
  template <class Visit>
  ECHELON_HOST_DEVICE void each_kept(const Visit& visit) const {
    if (!whole_) return;
    each_place(visit, std::make_integer_sequence<int, kept>());
  }

 private:
  template <class Visit, int... place>
  ECHELON_HOST_DEVICE void each_place(const Visit& visit, std::integer_sequence<int, place...>) const {
    ((first_ + place * step_ + N <= cols_ ? visit(Columns<N>{first_ + place * step_}, place) : void()), ...);
  }
  // The start of the incomplete run, if this lane has it; else cols_ or more.
  ECHELON_HOST_DEVICE std::int64_t first_of_rest() const {
    const std::int64_t last = cols_ / N * N;  // where an incomplete run begins
    return last < cols_ && last % step_ == first_ ? last : cols_;
  }

  std::int64_t first_, step_, cols_;
  bool whole_;
};

template <class Team, class T, int N>
class KeptRow {
 public:
  using Mine = LaneColumns<Team, N>;
  ECHELON_HOST_DEVICE KeptRow(const Mine& mine, const T* row) : row_(row) {
    mine.each_kept([&](auto at, int place) { first_[place] = at.read(row_); });
  }
  ECHELON_HOST_DEVICE Values<T, N> at(Columns<N> columns, int place) const {
    return place < Mine::kept ? first_[place] : columns.read(row_);
  }
  ECHELON_HOST_DEVICE Values<T, 1> at(Columns<1> columns, int) const requires(N > 1) {
    return columns.read(row_);
  }

 private:
  const T* row_;
  Values<T, N> first_[Mine::kept > 0 ? Mine::kept : 1];
};

}  // namespace echelon::rows
