#include "spec/sum_blocks.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {
namespace {

// Whether each cut of so many units into fewer than n powers of two is one of the cuts into n.
bool cuts_nest(std::int64_t units, int n) {
  if (units < n) return false;
  for (int t = 2; t < n; t *= 2)
    for (int i = 1; i < t; ++i)
      if (split_range(units, t, i).begin != split_range(units, n, i * (n / t)).begin) return false;
  return true;
}

}  // namespace

int num_sum_blocks(const std::vector<ParamSpec>& list) {
  constexpr int most = 8;
  for (int n = most; n > 1; n /= 2)
    if (std::all_of(list.begin(), list.end(), [n](const ParamSpec& spec) {
          return spec.shard_dim >= 0 &&
                 std::all_of(spec.pieces.begin(), spec.pieces.end(),
                             [n](const Piece& p) { return cuts_nest(p.length / p.unit, n); });
        }))
      return n;
  return 1;
}

std::vector<std::vector<Range>> sum_blocks(const std::vector<ParamSpec>& list, int tp, int index) {
  const int all = num_sum_blocks(list), each = all / tp;
  check(each * tp == all, "ranks have whole blocks");
  std::vector<std::vector<Range>> blocks(static_cast<std::size_t>(each));
  std::int64_t before = 0;  // of what the rank holds
  for (const ParamSpec& spec : list) {
    const std::vector<Range> here = local_ranges(spec, tp, index);
    for (int b = 0; b < each; ++b) {
      const std::vector<Range> ranges = local_ranges(spec, all, index * each + b);
      std::int64_t at = before;
      for (std::size_t piece = 0; piece < here.size(); ++piece) {
        const std::int64_t shift = at - here[piece].begin;
        blocks[static_cast<std::size_t>(b)].push_back(
            {ranges[piece].begin + shift, ranges[piece].end + shift});
        at += here[piece].size();
      }
    }
    for (const Range& range : here) before += range.size();
  }
  return blocks;
}

}  // namespace echelon
