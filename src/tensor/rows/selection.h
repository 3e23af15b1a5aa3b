// Finds the elements of a vector with the largest magnitudes (tensor/top_k.h defines them) with many blocks:
// radix selection of the magnitude of the last selected element, digit by digit from the top. For each digit,
// every block counts over its run of the vector, and one block adds the counts and chooses; finally every
// block moves its selected elements. Only counts are summed, never values: elements and places equal the
// host's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tensor/rows/codecs.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// The known digits of the last magnitude, and how many to take of the elements that agree with them.
template <class F>
struct Selection {
  using Bits = std::make_unsigned_t<MagnitudeBits<F>>;
  static constexpr int digits = 2 * sizeof(F), base = 16;
  Bits threshold;
  std::int64_t ties;

  ECHELON_HOST_DEVICE static Bits magnitude(F x) { return static_cast<Bits>(magnitude_bits(x)); }
  // The digits above `digit`; in two shifts, since a shift by all bits of a number is undefined.
  ECHELON_HOST_DEVICE static Bits above(Bits x, int digit) { return x >> (4 * digit) >> 4; }
  ECHELON_HOST_DEVICE static int at(Bits x, int digit) {
    return static_cast<int>(x >> (4 * digit)) & (base - 1);
  }
};

// A vector in runs, one for each block.
template <class F>
struct VectorRuns {
  F* x;
  std::int64_t count, each;
  ECHELON_HOST_DEVICE std::int64_t begin(std::int64_t run) const { return run * each; }
  ECHELON_HOST_DEVICE std::int64_t end(std::int64_t run) const {
    return (run + 1) * each < count ? (run + 1) * each : count;
  }
  ECHELON_HOST_DEVICE std::int64_t runs() const { return (count + each - 1) / each; }
};

// counts (runs, base): of the elements that agree in the digits above, how many have each value of this
// digit.
template <class F>
struct CountDigits {
  VectorRuns<F> of;
  int digit;
  const Selection<F>* selection;  // not read for the first digit
  std::int64_t* counts;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t run) const {
    using S = Selection<F>;
    const bool is_first = digit == S::digits - 1;
    const typename S::Bits known = is_first ? 0 : S::above(selection->threshold, digit);
    std::int64_t found[S::base] = {};
    for (std::int64_t i = of.begin(run) + team.lane(); i < of.end(run); i += team.lanes())
      if (const typename S::Bits m = S::magnitude(of.x[i]); S::above(m, digit) == known)
        ++found[S::at(m, digit)];
    for (int value = 0; value < S::base; ++value) {
      const std::int64_t total = sum_of(team, found[value]);
      if (team.lane() == 0) counts[run * S::base + value] = total;
    }
  }
};

// One block: chooses the next digit from all counts. `take`: how many elements in all.
template <class F>
struct ChooseDigit {
  const std::int64_t* counts;
  std::int64_t runs, take;
  int digit;
  Selection<F>* selection;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    using S = Selection<F>;
    std::int64_t totals[S::base];
    for (int value = 0; value < S::base; ++value) {
      std::int64_t own = 0;
      for (std::int64_t run = team.lane(); run < runs; run += team.lanes())
        own += counts[run * S::base + value];
      totals[value] = sum_of(team, own);
    }
    if (team.lane() != 0) return;
    const bool is_first = digit == S::digits - 1;
    std::int64_t ties = is_first ? take : selection->ties;
    int value = S::base - 1;
    while (value > 0 && totals[value] < ties) ties -= totals[value--];
    const auto chosen = static_cast<typename S::Bits>(value) << (4 * digit);
    *selection = {is_first ? chosen : selection->threshold | chosen, ties};
  }
};

// counts (runs, 2): elements above the threshold, and at it.
template <class F>
struct CountSelected {
  VectorRuns<F> of;
  const Selection<F>* selection;
  std::int64_t* counts;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t run) const {
    std::int64_t larger = 0, equal = 0;
    for (std::int64_t i = of.begin(run) + team.lane(); i < of.end(run); i += team.lanes()) {
      const auto m = Selection<F>::magnitude(of.x[i]);
      larger += m > selection->threshold ? 1 : 0;
      equal += m == selection->threshold ? 1 : 0;
    }
    larger = sum_of(team, larger);
    equal = sum_of(team, equal);
    if (team.lane() == 0) counts[2 * run] = larger, counts[2 * run + 1] = equal;
  }
};

// Moves a run's selected elements after those of earlier runs, in order, and leaves zeros. Each lane has a
// part of the run; `shared` is two numbers for each lane.
template <class F>
struct MoveSelected {
  VectorRuns<F> of;
  const Selection<F>* selection;
  const std::int64_t* counts;
  std::int64_t first_index;
  F* values;
  std::int32_t* indices;
  static std::size_t shared_bytes(std::int64_t lanes) {
    return 2 * sizeof(std::int64_t) * static_cast<std::size_t>(lanes);
  }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t run = team.block();
    std::int64_t larger = 0, equal = 0;  // counts before this run
    for (std::int64_t other = team.lane(); other < run; other += team.lanes())
      larger += counts[2 * other], equal += counts[2 * other + 1];
    larger = sum_of(team, larger);
    equal = sum_of(team, equal);

    const Selection<F> last = *selection;
    const std::int64_t first = of.begin(run), length = of.end(run) - first;
    const std::int64_t each = (length + team.lanes() - 1) / team.lanes();
    const std::int64_t begin = first + (team.lane() * each < length ? team.lane() * each : length);
    const std::int64_t end = begin + each < first + length ? begin + each : first + length;
    auto* const of_lane = reinterpret_cast<std::int64_t*>(team.shared());
    std::int64_t own_larger = 0, own_equal = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const auto m = Selection<F>::magnitude(of.x[i]);
      own_larger += m > last.threshold ? 1 : 0;
      own_equal += m == last.threshold ? 1 : 0;
    }
    of_lane[2 * team.lane()] = own_larger;
    of_lane[2 * team.lane() + 1] = own_equal;
    team.sync();
    for (std::int64_t lane = 0; lane < team.lane(); ++lane)
      larger += of_lane[2 * lane], equal += of_lane[2 * lane + 1];
    if (equal > last.ties) equal = last.ties;  // as many of them as are taken
    for (std::int64_t i = begin; i < end; ++i) {
      const auto m = Selection<F>::magnitude(of.x[i]);
      const bool ties = m == last.threshold;
      if (m < last.threshold || (ties && equal == last.ties)) continue;
      const std::int64_t to = larger + equal;
      ++(ties ? equal : larger);
      values[to] = of.x[i];
      indices[to] = static_cast<std::int32_t>(first_index + i);
      of.x[i] = 0;
    }
  }
};

// No index occurs twice.
template <class F>
struct AddAt {
  const F* values;
  const std::int32_t* indices;
  F* sum;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t i) const { sum[indices[i]] += values[i]; }
};

}  // namespace echelon::rows
