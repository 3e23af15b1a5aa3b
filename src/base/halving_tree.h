// The rule by which sums over ranks are grouped and data fan out over ranks. Under invariant numerics it also
// groups sums over sequences and over blocks of a reduction (docs/invariance.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace echelon {

// Where [begin, end) is halved; if the halves differ, the first is larger. end - begin >= 2.
//
// sum[a, b) = sum[a, m) + sum[m, b) with m = halving_cut(a, b), down to single ranks. So the first j levels
// split k 2^j ranks into groups of k neighbours: a sum inside the groups followed by one across them has the
// bits of the flat sum.
template <class Int>
constexpr Int halving_cut(Int begin, Int end) {
  return begin + (end - begin + 1) / 2;
}

// Whether the sum of `leaves` is a sum over `parts` equal runs of them: the runs are nodes of the tree, and
// the upper levels are the tree of `parts` leaves.
constexpr bool cuts_halving_tree(std::int64_t leaves, std::int64_t parts) {
  if (parts < 1 || leaves % parts != 0) return false;
  const std::int64_t each = leaves / parts;
  const auto cuts = [each](const auto& self, std::int64_t begin, std::int64_t end) -> bool {
    if (end - begin == 1) return true;
    const std::int64_t middle = halving_cut(begin, end);
    return halving_cut(begin * each, end * each) == middle * each && self(self, begin, middle) &&
           self(self, middle, end);
  };
  return cuts(cuts, 0, parts);
}

// How to sum leaves that arrive in order. When this leaf arrives, `waiting` partial sums already wait; after
// it, `merges` times the last two of the waiting sums are complete neighbours and are added.
struct TreePlace {
  int waiting = 0, merges = 0;
};
constexpr TreePlace tree_place(std::int64_t leaves, std::int64_t leaf) {
  TreePlace place;
  for (std::int64_t begin = 0, end = leaves; end - begin > 1;) {
    const std::int64_t middle = halving_cut(begin, end);
    const bool second = leaf >= middle;
    (second ? begin : end) = middle;
    place.waiting += second;
    place.merges = second ? place.merges + 1 : 0;
  }
  return place;
}
// The most sums that wait at once.
constexpr int most_waiting(std::int64_t leaves) {
  int most = 0;
  for (; leaves > 1; leaves /= 2) ++most;
  return most;
}

// The sum of numbers [begin, end), at least one, that are all there.
template <class Numbers>
constexpr auto halving_sum(const Numbers& numbers, std::int64_t begin, std::int64_t end)
    -> decltype(numbers[0] + numbers[0]) {
  if (end - begin == 1) return numbers[static_cast<std::size_t>(begin)];
  const std::int64_t middle = halving_cut(begin, end);
  return halving_sum(numbers, begin, middle) + halving_sum(numbers, middle, end);
}

}  // namespace echelon
