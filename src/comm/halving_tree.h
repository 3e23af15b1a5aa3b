// The one rule by which sums over ranks are grouped, and by which data fan out over ranks.
#pragma once

namespace echelon {

// Where [begin, end) is cut in halves; the first is the larger one when they differ. end - begin >= 2.
//
// sum[a, b) = sum[a, m) + sum[m, b) with m = halving_cut(a, b), down to single ranks. So the first j levels
// cut k 2^j ranks into groups of k neighbours each: a sum inside the groups followed by one across them has
// the bits of the flat sum.
template <class Int>
constexpr Int halving_cut(Int begin, Int end) {
  return begin + (end - begin + 1) / 2;
}

}  // namespace echelon
